"""The six probes of ../probes.py, written; that file says what they get."""

from __future__ import annotations

from exercises.performance_debugging.benchmarks.examine import Calls, Claim, Values


def precision(claim: Claim, calls: Calls, values: Values) -> str:
    """Is the error as small as float32 makes it?"""
    if values.error > 1e-5:  # float32 rounds to 6e-8, bfloat16 to 4e-3
        return f"an error of {values.error:.1g} is not that of float32"
    return ""


def new_values(claim: Claim, calls: Calls, values: Values) -> str:
    """Does the operation notice that x has changed?"""
    if values.error_after_change > 1e-2:
        return "new values in x, the old result: it was computed once and kept"
    return ""


def finished(claim: Claim, calls: Calls, values: Values) -> str:
    """Was the work done when the clock was read?"""
    # waiting for nothing takes some microseconds, too
    if claim.unfinished > claim.calls * claim.measured.seconds / 2 + 1e-4:
        return (
            f"the device works on for {1e3 * claim.unfinished:.2g} ms after the clock was read, "
            "on another stream"
        )
    return ""


def first_call(claim: Claim, calls: Calls, values: Values) -> str:
    """Does the benchmark tell what its user pays once?"""
    # loading a library takes some tenths of a second, and differs from process to process
    if calls.first > 5 * claim.measured.first + 0.5:
        return (
            f"the first call takes {calls.first:.1f} s, the benchmark says "
            f"{claim.measured.first:.2g} s"
        )
    return ""


def all_work(claim: Claim, calls: Calls, values: Values) -> str:
    """Does a call that is waited for take about as long as the benchmark says?"""
    if calls.warm > 3 * claim.measured.seconds:
        return (
            f"a call takes {1e6 * calls.warm:.1f} us, not {1e6 * claim.measured.seconds:.1f}: "
            "the loop does not do all of it"
        )
    return ""


def cache(claim: Claim, calls: Calls, values: Values) -> str:
    """Would a call in the midst of other work be as fast?"""
    if calls.cold > 1.2 * calls.warm:
        return (
            f"{1e6 * calls.cold:.1f} us with an empty cache, {1e6 * calls.warm:.1f} us with a warm "
            "one"
        )
    return ""


PROBES = (precision, new_values, finished, first_call, all_work, cache)
