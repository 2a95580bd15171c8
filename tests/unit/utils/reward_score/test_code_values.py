"""Values as plain data: what survives a round trip, what a subclass loses, and what a decoder refuses."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.code_rewards.wire_payloads import _VALUES
from verl.utils.reward_score.code_tests.channel import ProtocolError
from verl.utils.reward_score.code_tests.values import Decoder, Encoder, ValueRefused


def no_object(_, value):
    raise ValueRefused(f"not plain: {value!r}")


def sent(value):
    return json.loads(json.dumps(Encoder(no_object).encode(value), allow_nan=False))


def round_trip(value):
    return Decoder(no_object).decode(sent(value))


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.datetimes() | st.dates()
    | st.times() | st.timedeltas()
)  # fmt: skip
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(collections.deque)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(_values)
def test_plain_values_survive(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)


def test_types_that_compare_equal_stay_apart():
    values = [1, True, 1.0, -0.0, 10**5000, range(3), slice(1, None), bytearray(b"a"), collections.Counter("aab"), ...]
    result = round_trip(values)
    assert [type(value) for value in result] == [type(value) for value in values]
    assert result == values
    assert math.copysign(1, result[3]) == -1
    assert math.isnan(round_trip(float("nan")))
    assert round_trip(int) is int
    moment = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    assert round_trip(moment) == moment
    assert round_trip({"a": 1}.keys()) == {"a"}
    assert list(round_trip(collections.OrderedDict(b=1, a=2))) == ["b", "a"]


def test_arrays_survive():
    for array in (np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.array([1.5, np.nan]), np.zeros((0, 3))):
        result = round_trip(array)
        assert result.dtype == array.dtype
        assert np.array_equal(result, array, equal_nan=array.dtype.kind == "f")
    assert type(round_trip(np.float32(1.5))) is np.float32


def test_shared_references_and_cycles_survive():
    row = [1]
    first, second = round_trip([row, row])
    assert first is second
    row.append(row)
    result = round_trip(row)
    assert result[1] is result


class Yes(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Anything(list):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


class Color(enum.IntEnum):
    RED = 1


def test_a_subclass_becomes_its_base():
    for value, base in ((Yes(3), int), (Anything([1]), list), (Color.RED, int)):
        assert type(round_trip(value)) is base
    assert round_trip(Yes(3)) != 4
    assert round_trip(Anything([1])) != [2]
    point = collections.namedtuple("Point", "x y")(1, 2)
    assert round_trip(point) == (1, 2)
    assert round_trip(point).x == 1


def test_changed_arguments_are_changed_in_place():
    inner = [2, 1]
    outer = {"a": inner}
    encoder = Encoder(no_object)
    callee = Decoder(no_object)
    (copy,) = [callee.decode(encoder.encode(outer))]
    copy["a"].sort()
    copy["b"] = [copy["a"], [3]]
    reply = Encoder(no_object, callee.containers)
    updates = [[number, reply.content(value)] for number, value in enumerate(callee.containers)]
    caller = Decoder(no_object, encoder.containers)
    for number, content in updates:
        caller.replace(number, content)
    assert outer == {"a": [1, 2], "b": [[1, 2], [3]]}
    assert outer["a"] is inner
    assert outer["b"][0] is inner


@pytest.mark.parametrize("text", _VALUES)
def test_a_decoder_builds_plain_values_or_refuses(text):
    def no_reference(_, node):
        raise ProtocolError(str(node))

    plain = (list, dict, set, int, float, decimal.Decimal, fractions.Fraction, type(...), type, collections.deque)
    try:
        value = Decoder(no_reference).decode(json.loads(text))
    except (ValueRefused, ProtocolError, RecursionError):
        return
    assert type(value) in plain


def test_deep_values_are_refused():
    deep: list = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(ValueRefused):
        sent(deep)
