"""`python -m longspan`: what workers and comparisons start, without needing the script on the PATH."""

from longspan.cli import entry

if __name__ == "__main__":
    entry()
