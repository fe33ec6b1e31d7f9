"""Array specs: what they accept, what they convert from and to, and how two of them differ."""

import collections
import copy
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diskbuf.errors import SpecError, StoreFormatError
from diskbuf.specs import (
    ArraySpec,
    BoundedArraySpec,
    as_spec,
    differences,
    from_json,
    from_space,
    to_json,
    to_tensor_spec,
)
from diskbuf.tree import Structure

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
LONG = pytest.mark.skipif(np.finfo(np.longdouble).bits == 64, reason="long double is float64 on this platform")
DTYPES = ["bool", *INTS, *FLOATS, "complex64", "complex128"]


class Step(NamedTuple):
    observation: Any
    reward: Any


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
names = st.none() | st.text(max_size=3)


@st.composite
def bounded_specs(draw: st.DrawFn) -> BoundedArraySpec:
    shape, dtype = draw(shapes), draw(st.sampled_from(["bool", *INTS, *FLOATS]))
    bound_shape = st.sampled_from([(), shape, shape[1:], tuple(min(size, 1) for size in shape)])
    bounds = hnp.arrays(dtype, bound_shape, elements={"allow_nan": False} if dtype in FLOATS else None)
    low, high = draw(bounds), draw(bounds)
    if 0 in np.broadcast_shapes(low.shape, high.shape):
        return BoundedArraySpec(shape, dtype, low, high, draw(names))
    return BoundedArraySpec(shape, dtype, np.minimum(low, high), np.maximum(low, high), draw(names))


array_specs = st.builds(ArraySpec, shapes, st.sampled_from(DTYPES), names) | bounded_specs()
keys = st.sampled_from(["", "a/b", ".", "é", "\ud800", "1", "__a"]) | st.text(max_size=3) | st.integers()
spec_nests = st.recursive(
    array_specs,
    lambda children: (
        st.lists(children | st.none(), max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(keys, children, max_size=3)
        | st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict)
        | st.builds(Step, children, st.just(()))
    ),
    max_leaves=6,
).filter(lambda nest: Structure(nest).num_leaves)


def facts(spec: ArraySpec) -> tuple[Any, ...]:
    """Everything there is to know about a spec, to the bit."""
    bounds = (spec.minimum, spec.maximum) if isinstance(spec, BoundedArraySpec) else ()
    sides = [(bound.dtype, bound.shape, bound.tobytes()) for bound in bounds]
    return type(spec), spec.shape, spec.dtype, spec.name, *sides


@given(spec_nests)
def test_a_spec_nest_comes_back_from_json_to_the_bit(nest: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(nest), allow_nan=False)))
    structure = Structure(nest)
    assert Structure(back) == structure
    assert [facts(spec) for spec in structure.flatten(back)] == [facts(spec) for spec in structure.flatten(nest)]
    assert repr(back) == repr(nest)
    assert differences(nest, back) == []


@given(array_specs)
def test_a_spec_can_be_copied_and_pickled(spec: ArraySpec) -> None:
    for back in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert facts(back) == facts(spec)
        assert back == spec
        assert hash(back) == hash(spec)


@given(array_specs, array_specs)
def test_two_specs_are_equal_exactly_when_they_do_not_differ(left: ArraySpec, right: ArraySpec) -> None:
    assert (left == right) == (differences(left, right) == [])
    assert differences(left, left) == []


@given(bounded_specs())
def test_bounds_mean_the_same_once_broadcast(spec: BoundedArraySpec) -> None:
    full = [np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum)]
    broadcast = BoundedArraySpec(spec.shape, spec.dtype, *full)
    assert broadcast == spec
    assert hash(broadcast) == hash(spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_is_allowed_is_kept(dtype: str) -> None:
    spec = ArraySpec((2,), dtype)
    assert spec.dtype == np.dtype(dtype)
    assert from_json(to_json(spec)) == spec
    assert ArraySpec((2,), np.dtype(dtype).type) == spec


def test_numpy_ints_make_a_shape_of_ints() -> None:
    spec = ArraySpec(np.array([2, 3]), "float32")
    assert spec.shape == (2, 3)
    assert all(type(size) is int for size in spec.shape)
    assert ArraySpec(iter([2, 0]), "float32").shape == (2, 0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (3, r"shape must be a tuple of ints, got 3\. Write \(4,\) for four elements\."),
        (None, r"shape must be a tuple of ints, got None"),
        ((None, 3), r"shape must have a fixed size in every axis, got \(None, 3\)\. Leave out batch and time axes\."),
        ((-1,), r"shape must be ints of at least 0, got \(-1,\)"),
        ((True,), r"shape must be ints of at least 0, got \(True,\)"),
        ((2.0,), r"shape must be a tuple of ints, got \(2\.0,\)"),
        ("ab", r"shape must be a tuple of ints, got \('a', 'b'\)"),
        (np.zeros((2, 2), int), r"shape must be a tuple of ints"),
    ],
)
def test_a_shape_that_is_not_of_fixed_ints_is_refused(shape: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ArraySpec(shape, "float32")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (None, r"dtype must be one of bool, int8, .*, complex128, got None\. Cast to"),
        ("nope", r"got nope\. Cast to"),
        (object, r"got object\. Encode text and objects as numbers"),
        ("U3", r"got <U3\. Encode text"),
        ("S3", r"got \|S3\. Encode text"),
        (np.dtypes.StringDType(), r"got StringDType\(\)\. Encode text"),
        ("datetime64[s]", r"got datetime64\[s\]\. Store times as int64"),
        ("timedelta64[s]", r"got timedelta64\[s\]\. Store times as int64"),
        ([("a", "float32")], r"Use a dict with one leaf per field"),
        (("float32", (2,)), r"dtype must be one of"),
        pytest.param(np.longdouble, r"got float\d+\. Cast to", marks=LONG),
        pytest.param(np.clongdouble, r"got complex\d+\. Cast to", marks=LONG),
        (np.dtype("float32").newbyteorder("S"), r"dtype must be in native byte order, got .f4\. Use 'float32'"),
    ],
)
def test_a_dtype_that_does_not_keep_is_refused(dtype: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ArraySpec((), dtype)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(SpecError, match="the name of a spec must be a str or None, got 3"):
        ArraySpec((), "float32", 3)  # type: ignore[arg-type]


def test_a_name_makes_no_difference() -> None:
    assert ArraySpec((), "float32", "a") == ArraySpec((), "float32", "b")
    assert len({ArraySpec((), "float32", "a"), ArraySpec((), "float32"), ArraySpec((), "float64")}) == 2
    assert ArraySpec((), "float32") != BoundedArraySpec((), "float32", 0, 1)
    assert ArraySpec((), "float32") != "float32"


def test_a_spec_cannot_be_changed() -> None:
    given_bound = np.zeros(2, "float32")
    spec = BoundedArraySpec((2,), "float32", given_bound, 1)
    given_bound[:] = 9
    assert spec.minimum.tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        spec.minimum[0] = 5
    for fact in ("shape", "dtype", "name", "minimum", "maximum", "other"):
        with pytest.raises(AttributeError):
            setattr(spec, fact, None)


def test_a_repr_can_be_read_and_evaluated() -> None:
    spec = BoundedArraySpec((2,), "float32", [0.1, 0], np.float32(0.2), "x")
    assert repr(spec) == "BoundedArraySpec((2,), 'float32', minimum=[0.1, 0.0], maximum=0.2, name='x')"
    assert eval(repr(spec)) == spec
    assert len(repr(BoundedArraySpec((100, 100), "uint8", np.arange(100), np.full((100, 100), 255)))) < 200


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("int64", -(2**63), 2**63 - 1),
        ("uint64", 0, 2**64 - 1),
        ("uint8", 0.0, 255.0),
        ("bool", False, True),
        ("bool", 0, 1),
        ("float32", -np.inf, np.inf),
        ("float16", -65504, 65504),
        ("float32", 2**24, 2**24 + 2),
        ("float32", 0.1, 0.2),
        ("float64", -0.0, 5e-324),
        ("float64", np.uint8(3), True + 3),
    ],
)
def test_bounds_that_the_dtype_holds_are_kept(dtype: str, low: Any, high: Any) -> None:
    spec = BoundedArraySpec((2,), dtype, low, high)
    assert spec.minimum.dtype == spec.maximum.dtype == dtype
    assert spec.minimum.shape == spec.maximum.shape == ()
    assert (spec.minimum, spec.maximum) == (np.dtype(dtype).type(low), np.dtype(dtype).type(high))


@pytest.mark.parametrize(
    ("dtype", "low", "high", "message"),
    [
        ("uint8", -1, 5, r"minimum must be values that uint8 can hold, got -1\."),
        ("uint8", 0, 256, r"maximum must be values that uint8 can hold, got 256\."),
        ("uint8", 0, 255.5, r"maximum .* got 255\.5"),
        ("uint8", [0, 300], 400, r"minimum .* got \[0, 300\]"),
        ("int64", 0, 2.0**63, r"maximum .* int64"),
        ("uint64", 0, 2.0**64, r"maximum .* uint64"),
        ("uint64", 0, 2**64, r"maximum .* uint64"),
        ("int32", 0, np.inf, r"maximum .* int32 can hold, got inf"),
        ("int32", np.nan, 0, r"minimum .* int32 can hold, got nan"),
        ("bool", 0, 2, r"maximum .* bool"),
        ("float32", 0, 1e39, r"maximum .* float32 can hold, got 1e\+39"),
        ("float16", 0, 70000, r"maximum .* float16"),
        ("float32", 2**24 + 1, 2**25, r"minimum .* float32 can hold, got 16777217"),
        ("float32", np.nan, 0, r"minimum .* float32 can hold, got nan"),
        ("float32", 0, 1j, r"maximum .* got 1j"),
        ("float32", None, 0, r"minimum .* got None"),
        ("float32", "0", 1, r"minimum .* got 0"),
        ("float32", 2, 1, r"minimum must be at most maximum, got minimum 2\.0 and maximum 1\.0"),
        ("float32", [0, 2], [1, 1], r"minimum must be at most maximum"),
        ("float32", [1, 2, 3], 4, r"minimum must broadcast to \[2\], got \[1, 2, 3\]"),
        ("float32", [[1], [2, 3]], 4, r"minimum must broadcast to \[2\]"),
        ("float32", 0, [[1, 1]], r"maximum must broadcast to \[2\]"),
        ("complex64", 0, 1, r"a bounded spec must have a dtype with an order, got complex64\. Use ArraySpec\."),
    ],
)
def test_bounds_that_the_dtype_cannot_hold_are_refused(dtype: str, low: Any, high: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        BoundedArraySpec((2,), dtype, low, high)


BASE = {"observation": {"camera": ArraySpec((84, 84, 4), "uint8")}, "action": BoundedArraySpec((2,), "float32", -1, 1)}


def changed(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        (BASE, []),
        (changed(action=BoundedArraySpec((2,), "float32", [-1, -1], 1, "an action")), []),
        (collections.OrderedDict(action=BASE["action"], observation=BASE["observation"]), []),
        (
            collections.OrderedDict(observation=BASE["observation"], action=BASE["action"]),
            ["order of the leaves: the store has action, observation/camera, the data_spec observation/camera, action"],
        ),
        (
            changed(observation={"camera": ArraySpec((84, 84, 4), "float32")}),
            ["leaf 'observation/camera': the store has uint8 [84, 84, 4], the data_spec float32 [84, 84, 4]"],
        ),
        (
            changed(observation={"camera": ArraySpec((84, 84), "uint8")}, action=ArraySpec((2,), "float32")),
            [
                "leaf 'observation/camera': the store has uint8 [84, 84, 4], the data_spec uint8 [84, 84]",
                "leaf 'action': the store has minimum -1.0 and maximum 1.0, the data_spec no bounds",
            ],
        ),
        (
            changed(action=BoundedArraySpec((2,), "float32", [-1, -2], 3)),
            [
                "leaf 'action': the store has minimum -1.0 at [1], the data_spec minimum -2.0 at [1]",
                "leaf 'action': the store has maximum 1.0, the data_spec maximum 3.0",
            ],
        ),
        (
            changed(observation={"lidar": ArraySpec((5,), "float32")}),
            [
                "at 'observation/camera': the store has uint8 [84, 84, 4], the data_spec nothing",
                "at 'observation/lidar': the store has nothing, the data_spec float32 [5]",
            ],
        ),
        (
            changed(observation=(ArraySpec((84, 84, 4), "uint8"),)),
            ["at 'observation': the store has {'camera': uint8 [84, 84, 4]}, the data_spec (uint8 [84, 84, 4],)"],
        ),
        (
            ArraySpec((), "bool"),
            [
                (
                    "the nest: the store has {'observation': {'camera': uint8 [84, 84, 4]}, 'action': float32 [2]}, "
                    "the data_spec bool []"
                )
            ],
        ),
    ],
)
def test_differences_are_told_leaf_by_leaf(wanted: Any, lines: list[str]) -> None:
    assert differences(BASE, wanted) == lines


def test_a_bare_leaf_and_a_scalar_bound_are_told_apart() -> None:
    left, right = BoundedArraySpec((), "int64", 0, 4), BoundedArraySpec((), "int64", 0, 5)
    assert differences(left, right) == ["the leaf: the store has maximum 4, the data_spec maximum 5"]


def test_namedtuples_of_equal_classes_do_not_differ() -> None:
    theirs = collections.namedtuple("Step", "observation reward")  # noqa: PYI024
    leaf = ArraySpec((), "float32")
    assert differences(Step(leaf, ()), theirs(leaf, ())) == []
    assert len(differences(Step(leaf, ()), (leaf, ()))) == 1


def test_a_bound_that_is_the_same_everywhere_takes_no_room_in_json() -> None:
    low, high = np.zeros((84, 84, 4), "uint8"), np.full((84, 84, 4), 255, "uint8")
    spec = BoundedArraySpec((84, 84, 4), "uint8", low, high)
    assert len(json.dumps(to_json(spec))) < 300
    assert facts(from_json(to_json(spec))) == facts(spec)


def test_what_json_looks_like() -> None:
    nest = {"a": BoundedArraySpec((2,), "float32", -np.inf, [0.5, np.inf], "x")}
    assert to_json(nest) == {
        "structure": {"type": "dict", "items": [["a", "leaf"]]},
        "leaves": [
            {
                "shape": [2],
                "dtype": "float32",
                "name": "x",
                "minimum": "-Infinity",
                "maximum": {"shape": [2], "values": [0.5, "Infinity"]},
            }
        ],
    }


LEAF: dict[str, Any] = {"shape": [2], "dtype": "uint8", "name": None, "minimum": 0, "maximum": 1}


@pytest.mark.parametrize(
    "value",
    [
        *[None, 3, "leaf", [], {}, {"structure": "leaf"}, {"leaves": []}],
        {"structure": "leaf", "leaves": []},
        {"structure": "leaf", "leaves": [LEAF, LEAF]},
        {"structure": "nest", "leaves": [LEAF]},
        {"structure": "leaf", "leaves": "a"},
        {"structure": "leaf", "leaves": 3},
        *[
            {"structure": "leaf", "leaves": [leaf]}
            for leaf in [
                *[None, 3, "a", [], {}],
                *[{key: LEAF[key] for key in LEAF if key != missing} for missing in LEAF],
                *[{**LEAF, "shape": shape} for shape in (None, 2, "2", [None], [2.0], [-1], [[2]], {}, [10**30])],
                *[{**LEAF, "dtype": dtype} for dtype in (None, "object", "nope", ">f4", 3, ["a", "b"], {"a": 1})],
                *[{**LEAF, "name": name} for name in (3, [])],
                *[
                    {**LEAF, "minimum": bound}
                    for bound in (None, 2, -1, 0.0, False, "0", "NaN", "Infinity", [0], [], {})
                ],
                *[
                    {**LEAF, "minimum": {"shape": shape, "values": values}}
                    for shape, values in [([2], [0, 0, 0]), ([3], [0]), ([2], []), ([2], 0), (None, [0]), ([2], ["a"])]
                ],
            ]
        ],
    ],
)
def test_json_that_to_json_did_not_write_is_refused(value: Any) -> None:
    with pytest.raises(StoreFormatError, match=r"must be what .*to_json writes, got "):
        from_json(value)


def test_a_spec_stays_as_it_is() -> None:
    assert as_spec(BASE)["action"] is BASE["action"]


def test_tensorflow_specs_become_array_specs() -> None:
    nest = Step(
        tf.TensorSpec([84, 84], tf.uint8, "camera"), (tf.TensorSpec((), tf.bool), tf.TensorSpec([0], tf.complex64))
    )
    assert repr(as_spec(nest)) == repr(
        Step(ArraySpec((84, 84), "uint8", "camera"), (ArraySpec((), "bool"), ArraySpec((0,), "complex64")))
    )


def test_bounded_specs_of_other_libraries_keep_their_bounds() -> None:
    tensor = {"shape": tf.TensorShape([2]), "dtype": tf.float32, "name": "action"}
    array = {"shape": (2,), "dtype": np.dtype("float32"), "name": "action"}
    for facts_of_it in (tensor, array):
        theirs = SimpleNamespace(**facts_of_it, minimum=np.float32(-1), maximum=np.array([1, 2], "float32"))
        assert facts(as_spec(theirs)) == facts(BoundedArraySpec((2,), "float32", -1, [1, 2], "action"))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (tf.TensorSpec([None, 3], tf.float32), r"shape must have a fixed size in every axis, got \(None, 3\)"),
        (tf.TensorSpec(None, tf.float32), r"shape must be a tuple of ints, got <unknown>\. Give each axis its size\."),
        (tf.TensorSpec([], tf.string), r"dtype must be one of .* got object\. Encode text"),
        (tf.TensorSpec([], tf.bfloat16), r"dtype must be one of .* got bfloat16\. Cast to"),
        (np.zeros(3, "float32"), r"a spec must be an ArraySpec, got float32 \[3\]\. Write ArraySpec\(shape, dtype\)\."),
        (tf.zeros(3), r"a spec must be an ArraySpec, got .*float32.* \[3\]"),
        (tf.Variable(1.0, name="a_variable"), r"a spec must be an ArraySpec, got "),
        ("float32", r"a spec must be an ArraySpec, got str"),
        (np.float32, r"a spec must be an ArraySpec, got "),
        ({1, 2}, r"a spec must be an ArraySpec, got set"),
        (spaces.Text(3), r"a space must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, got Text"),
    ],
)
def test_what_is_no_spec_is_refused_with_its_path(leaf: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^leaf 'a/0': {message}") as raised:
        as_spec({"a": [leaf]})
    assert raised.value.path == "a/0"
    with pytest.raises(SpecError, match=f"^{message}") as raised:
        as_spec(leaf)
    assert raised.value.path is None


@pytest.mark.parametrize("nest", [(), {}, None, {"a": (), "b": None}, spaces.Dict(), spaces.Tuple([])])
def test_a_spec_without_leaves_is_refused(nest: Any) -> None:
    with pytest.raises(SpecError, match=r"a data_spec must have at least one leaf, got .* Put an ArraySpec in it"):
        as_spec(nest)


@given(spec_nests)
def test_tensor_specs_have_the_same_shapes_dtypes_and_names(nest: Any) -> None:
    structure = Structure(nest)
    tensor_specs = structure.flatten(to_tensor_spec(nest))
    for tensor_spec, spec in zip(tensor_specs, structure.flatten(nest), strict=True):
        assert type(tensor_spec) is tf.TensorSpec
        assert facts(as_spec(tensor_spec)) == (ArraySpec, spec.shape, spec.dtype, spec.name)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(0, 255, (2, 3), np.uint8), BoundedArraySpec((2, 3), "uint8", 0, 255)),
        (spaces.Box(-np.inf, np.inf, (2,)), BoundedArraySpec((2,), "float32", -np.inf, np.inf)),
        (
            spaces.Box(np.array([-1, 0]), np.array([1, 2]), dtype=np.float64),
            BoundedArraySpec((2,), "float64", [-1, 0], [1, 2]),
        ),
        (spaces.Box(0, 1, (), np.float16), BoundedArraySpec((), "float16", 0, 1)),
        (spaces.Discrete(3), BoundedArraySpec((), "int64", 0, 2)),
        (spaces.Discrete(3, start=-1), BoundedArraySpec((), "int64", -1, 1)),
        (spaces.MultiDiscrete([2, 3]), BoundedArraySpec((2,), "int64", 0, [1, 2])),
        (
            spaces.MultiDiscrete([[2, 3]], start=[[5, -6]], dtype=np.int8),
            BoundedArraySpec((1, 2), "int8", [[5, -6]], [[6, -4]]),
        ),
        (spaces.MultiBinary(4), BoundedArraySpec((4,), "int8", 0, 1)),
        (spaces.MultiBinary([2, 3]), BoundedArraySpec((2, 3), "int8", 0, 1)),
    ],
)
def test_a_space_becomes_a_bounded_spec_that_its_samples_fit(space: Any, expected: BoundedArraySpec) -> None:
    spec = from_space(space)
    assert repr(spec) == repr(expected)
    sample = np.asarray(space.sample())
    assert (sample.shape, sample.dtype) == (spec.shape, spec.dtype)
    assert np.all(spec.minimum <= sample)
    assert np.all(sample <= spec.maximum)


def test_dict_and_tuple_spaces_become_dicts_and_tuples() -> None:
    space = spaces.Dict(b=spaces.Tuple([spaces.Discrete(2)]), a=spaces.Dict(c=spaces.MultiBinary(1)))
    expected = {"b": (BoundedArraySpec((), "int64", 0, 1),), "a": {"c": BoundedArraySpec((1,), "int8", 0, 1)}}
    assert from_space(space) == expected
    assert as_spec({"x": space}) == {"x": expected}


def test_a_space_inside_another_is_named_when_it_is_refused() -> None:
    space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None)]))
    with pytest.raises(SpecError, match=r"leaf 'a/1': a space must be Box, .*, got Graph") as raised:
        from_space(space)
    assert raised.value.path == "a/1"
    with pytest.raises(SpecError, match="leaf 'x/a/1'"):
        as_spec({"x": space})
    with pytest.raises(SpecError, match=r"^a space must be .*, got int"):
        from_space(3)


def test_the_specs_of_a_gymnasium_environment_fit_its_steps() -> None:
    with gymnasium.make("CartPole-v1") as env:
        spec = from_space(env.observation_space)
        observation, _ = env.reset(seed=1)
    assert (observation.shape, observation.dtype) == (spec.shape, spec.dtype)


def test_specs_import_neither_tensorflow_nor_gymnasium() -> None:
    code = (
        "import sys, diskbuf.specs as s; s.to_json(s.as_spec({'a': s.ArraySpec((), 'bool')}));"
        "print({'tensorflow', 'gymnasium'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
