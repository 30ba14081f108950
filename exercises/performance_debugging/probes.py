"""Six probes for a benchmark, for you to write: each returns what is wrong in one line, or "".

claim  measured.first, measured.seconds: what the benchmark says of the first call, and of one of
       the `calls` after it; unfinished: how long the device worked on when its clock was read
calls  first: the first call in a fresh process; cold: a call with nothing of x in the cache;
       warm: a call right after it
values error, error_after_change: the largest error over the largest right value; for the second
       one x got new values in place

All times are in seconds, by our own clocks but for claim.measured. Two honest measurements of the
same thing differ, too: choose factors that a busy machine does not reach.
"""

from __future__ import annotations

from exercises.performance_debugging.benchmarks.examine import Calls, Claim, Values


def precision(claim: Claim, calls: Calls, values: Values) -> str:
    """Is the error as small as float32 makes it?"""
    raise NotImplementedError  # your code


def new_values(claim: Claim, calls: Calls, values: Values) -> str:
    """Does the operation notice that x has changed?"""
    raise NotImplementedError  # your code


def finished(claim: Claim, calls: Calls, values: Values) -> str:
    """Was the work done when the clock was read?"""
    raise NotImplementedError  # your code


def first_call(claim: Claim, calls: Calls, values: Values) -> str:
    """Does the benchmark tell what its user pays once?"""
    raise NotImplementedError  # your code


def all_work(claim: Claim, calls: Calls, values: Values) -> str:
    """Does a call that is waited for take about as long as the benchmark says?"""
    raise NotImplementedError  # your code


def cache(claim: Claim, calls: Calls, values: Values) -> str:
    """Would a call in the midst of other work be as fast?"""
    raise NotImplementedError  # your code


PROBES = (precision, new_values, finished, first_call, all_work, cache)
