"""Stacks as faulthandler prints them, and the ranks that are elsewhere."""

from __future__ import annotations

from fleetrun.postmortem.stack_groups import Frame, StackGroup, compare, main_thread

FAULTHANDLER = """\
# process 7: python train.py
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1000 in run

Current thread 0x00007f0b (most recent call first):
  File "/home/me/a "b".py", line 5 in load_batch
  File "/home/me/train.py", line 9 in <module>
# process 8: python child
Current thread 0x00007f0c (most recent call first):
  File "/x/queue.py", line 3 in recv
"""
WAIT = (
    Frame("all_reduce", "/x/site-packages/paddle/group.py", 51),
    Frame("step", "/home/me/train.py", 9),
)
LOAD = (Frame("load_batch", "/home/me/train.py", 5), Frame("step", "/home/me/train.py", 8))


def test_the_main_thread_is_the_last_of_faulthandler() -> None:
    assert main_thread(FAULTHANDLER) == (
        Frame("load_batch", '/home/me/a "b".py', 5),
        Frame("<module>", "/home/me/train.py", 9),
    )


def test_our_wrappers_of_paddles_calls_are_no_place() -> None:
    dump = """# process 7: python
Current thread 0x1 (most recent call first):
  File "/x/fleetrun/inject/store_wait.py", line 65 in wait
  File "/x/fleetrun/inject/border.py", line 51 in watched
  File "/x/fleetrun/inject/import_hooks.py", line 77 in replaced
  File "/x/site-packages/paddle/parallel.py", line 1162 in init_parallel_env
"""
    place = Frame("init_parallel_env", "/x/site-packages/paddle/parallel.py", 1162)
    assert main_thread(dump) == (place,)


def test_what_is_no_dump_has_no_stack() -> None:
    assert main_thread("") == ()
    dump = (
        "# process 7: python\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n"
    )
    assert main_thread(dump) == ()


def test_the_rank_that_stands_elsewhere_is_found() -> None:
    finding = compare({0: WAIT, 1: LOAD, 2: WAIT, 3: WAIT})
    assert finding.odd == (1,)
    assert [place.ranks for place in finding.places] == [(1,), (0, 2, 3)]
    assert str(finding.places[1]) == "all_reduce (group.py:51), called from step (train.py:9)"
    assert str(finding.places[0]) == "load_batch (train.py:5)"


def test_of_two_it_is_the_one_that_does_not_wait_for_the_other() -> None:
    assert compare({0: WAIT, 1: LOAD}).odd == (1,)
    assert compare({0: LOAD, 1: LOAD[:1]}).odd == ()


def test_lines_matter_only_if_they_make_a_majority() -> None:
    elsewhere = [(WAIT[0], WAIT[1]._replace(line=n)) for n in range(4)]
    assert compare(dict(enumerate(elsewhere))).odd == ()
    assert compare({**dict(enumerate(elsewhere)), 4: LOAD}).odd == (4,)
    assert compare({0: WAIT, 1: WAIT, 2: elsewhere[0]}).odd == (2,)


def test_who_waits_elsewhere_is_not_odd_beside_who_does_not_wait() -> None:
    # Rank 0 serves the store in which the others meet.
    first = (Frame("init_parallel_env", "/x/site-packages/paddle/parallel.py", 3), WAIT[1])
    ranks = {0: first, 1: WAIT, 2: LOAD, 3: WAIT, 4: WAIT, 5: WAIT}
    assert compare(ranks).odd == (2,)
    assert compare({**ranks, 2: WAIT}).odd == (0,)


def test_lines_of_a_librarys_loop_make_nobody_odd() -> None:
    again = (WAIT[0]._replace(line=52), WAIT[1])
    elsewhere = (WAIT[0]._replace(line=53), WAIT[1]._replace(line=12))
    finding = compare({0: WAIT, 1: again, 2: elsewhere})
    assert finding.odd == (2,)


def test_our_own_code_in_a_checkout_is_not_the_users() -> None:
    ours = Frame("apply", "/home/me/fleetrun/fleetrun/inject/updates.py", 323)
    (place,) = compare({0: (WAIT[0], ours, *WAIT[1:])}).places
    assert str(place) == "all_reduce (group.py:51), called from step (train.py:9)"


def test_who_cannot_be_asked_is_not_odd() -> None:
    assert compare({0: WAIT, 1: (), 2: WAIT}).odd == ()
    assert compare({0: (), 1: ()}).places == ()
    assert str(StackGroup((0,), ())) == "no Python code"
