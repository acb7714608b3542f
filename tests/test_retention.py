"""Which checkpoints go, by a table."""

import pytest

from minititan.checkpoint.retention import Keep, steps_to_remove

NAN, INF = float("nan"), float("inf")

# rules; steps (with losses); the step just saved; those that go
TABLE = [
    (Keep(), [1, 2, 3], 3, []),  # all stay
    (Keep(latest_k=0, every_n_steps=2, best_k=1), [1, 2, 3], 3, []),
    (Keep(latest_k=1), [1, 2, 3], 3, [1, 2]),
    (Keep(latest_k=2), [1, 2, 3], 3, [1]),
    (Keep(latest_k=9), [1, 2, 3], 3, []),
    (Keep(latest_k=2), [10, 9, 100], 9, [10]),  # newest by number, and the one just saved
    (Keep(latest_k=1), [10, 9, 100], 9, [10, 100]),
    (Keep(latest_k=2), {}, 3, []),
    (Keep(latest_k=1, every_n_steps=10), [10, 15, 20, 25, 30, 35], 35, [15, 25]),
    (Keep(latest_k=2, every_n_steps=10), [10, 15, 20, 25, 30, 35], 35, [15, 25]),
    (Keep(latest_k=1, every_n_steps=1), [1, 2, 3], 3, []),
    (Keep(latest_k=1, every_n_steps=7), [0, 3, 7, 8], 8, [3]),  # imported weights lie at step 0
    (Keep(latest_k=1, best_k=1), {1: 3.0, 2: 1.0, 3: 2.0}, 3, [1]),
    (Keep(latest_k=1, best_k=2), {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0}, 4, [1]),
    (Keep(latest_k=1, best_k=1), {1: 1.0, 2: 1.0, 3: 2.0}, 3, [1]),  # of equal ones the later
    (Keep(latest_k=1, best_k=1), {1: 3.0, 2: None, 3: None, 4: None}, 4, [2, 3]),  # not validated
    (Keep(latest_k=1, best_k=1), {1: NAN, 2: 4.0, 3: INF, 4: NAN}, 4, [1, 3]),
    (Keep(latest_k=1, best_k=1), {1: 2.0, 2: 3.0, 3: 1.0}, 3, [1, 2]),  # the best is the newest too
    (Keep(latest_k=1, best_k=9), {1: 2.0, 2: 3.0, 3: None, 4: None}, 4, [3]),
    (Keep(latest_k=1, every_n_steps=4, best_k=1), {1: 9.0, 2: 1.0, 4: 8.0, 5: 7.0, 6: 7.5}, 6, [1, 5]),
]


@pytest.mark.parametrize("keep, steps, just_saved, gone", TABLE)
def test_what_goes(keep, steps, just_saved, gone):
    losses = steps if isinstance(steps, dict) else dict.fromkeys(steps)
    assert steps_to_remove(keep, losses, just_saved) == gone
