"""What a peer failed with, as it is told: once, with the rank's name, however many tell it on."""

from __future__ import annotations

import pytest

from symmplan.coordination.groups import Group
from symmplan.coordination.sessions import post_error, posted_error
from symmplan.errors import AgreementError, BackendError, PeerLostError, PeerTimeoutError


class Store(dict):
    """What the ranks of a group share."""

    def check(self, keys):
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value.encode()


def told(error, *groups, rank=1):
    """``error`` of a rank of the first group, as the last group hears it, from one to the next."""
    for name in groups:
        group = Group(name, name, rank=rank, size=4, store=Store())
        post_error(group, "error", error)
        error = posted_error(group, "error")
        rank = 2
    return error


def test_who_failed_is_named_once():
    error = told(BackendError("no luck", fix="try tomorrow", group="a"), "a", "a", "a")
    assert error.what == "rank 1 failed: no luck"
    assert (error.failed_rank, error.fix) == (1, "try tomorrow")


def test_peers_of_a_program_that_raised_hear_where_to_look():
    error = told(ValueError("mine"), "a", "a")
    assert error.what == "rank 1 failed: ValueError: mine"
    assert error.fix == "mend what raised on rank 1, whose traceback says where"


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("process 7 ended", group="a", lost_rank=3),
        PeerTimeoutError("nobody came", group="a", missing=(3,)),
        AgreementError("plans differ", group="a", ranks=(0, 3)),
    ],
)
def test_an_error_that_says_which_ranks_it_is_about_is_told_as_it_is(error):
    assert told(error, "a", "a").what == error.what


@pytest.mark.parametrize("error", [BackendError("rank and file", group="a"), ValueError("rank 9")])
def test_an_error_is_not_known_by_its_first_word(error):
    assert told(error, "a").what.startswith("rank 1 failed: ")


def test_ranks_have_the_numbers_of_the_group_that_told_first():
    error = told(BackendError("no luck", group="a"), "b", "c", "d")
    assert error.what == "rank 1 failed: no luck, by the numbers of group 'a'"
    assert error.numbers_of == "a"


def test_a_message_may_speak_of_groups():
    error = told(BackendError("odd, by the numbers of group 'x'", group="a"), "b")
    assert error.what.endswith("'x', by the numbers of group 'a'")
