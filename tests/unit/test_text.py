"""Stop strings and text: any cutting of the same text gives the same answer."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.text.stop import StopMatcher

ALPHABET = st.text("abc", max_size=30)


@given(ALPHABET, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5)))
def test_cutting_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    whole = StopMatcher(stops)
    for character in text:
        whole.push(character)
    matcher = StopMatcher(stops)
    out, position = "", 0
    for cut in [*cuts, len(text)]:
        out += matcher.push(text[position : position + cut])
        assert not any(stop in out for stop in stops), "part of a stop string was let through"
        position += cut
    out += matcher.push(text[position:])
    assert matcher.matched == whole.matched
    if matcher.matched is None:
        assert out + matcher.flush() == text
    else:
        assert text.startswith(out + matcher.matched)
        assert matcher.push("more") == ""


def test_held_back_text_is_released_when_the_match_fails() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("ABC", "DEF", "G", "x")] == ["ABC", "", "", "DEFGx"]


def test_one_stop_a_prefix_of_the_other() -> None:
    matcher = StopMatcher(["abcd", "ab"])
    assert matcher.push("xabcd") == "x"
    assert matcher.matched == "ab"
