"""Find three digits in a haystack: the task of examples/rl_needle.toml.

A prompt is 48 characters of noise with "#ddd" somewhere in its middle half, and ends in "?". Where every document is
split head and tail over two ranks, the digits lie on one rank and the answer is given on the other.
"""

import random
import string


def rows(count=512, length=48, seed=0):
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        noise = generator.choices(string.ascii_lowercase, k=length - 1)
        answer = "".join(generator.choices(string.digits, k=3))
        at = generator.randrange(length // 4 + 2, 3 * length // 4 - 4)
        noise[at : at + 4] = "#" + answer
        made.append({"prompt": "".join(noise) + "?", "answer": answer})
    return made
