from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    return pool.run
