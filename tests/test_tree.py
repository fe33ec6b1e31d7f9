"""Taking nests apart, putting them together, naming their leaves, and saying why one doesn't fit."""

import collections
import copy
import importlib
import json
import pickle
import subprocess
import sys
import types
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.errors import SpecError, StoreFormatError
from diskbuf.trajectories import TimeStep
from diskbuf.tree import Structure, compare, describe


class Step(NamedTuple):
    observation: Any
    reward: Any


class Info(NamedTuple):
    observation: Any
    reward: Any


def another_class(name: str, fields: str) -> Any:
    """A namedtuple class of its own, as another package or another process would have it."""
    return collections.namedtuple(name, fields)  # noqa: PYI024


AWKWARD_KEYS = [
    *["", " ", "a b", "a/b", "/", "\\", "a\\b", "%", "%2F", "%41", "\0", "\n", "\x7f", "~"],
    *[".", "..", "...", ".hidden", "trailing.", "a.b", "__a", "_a", "zarr.json", "c", "data"],
    *["\u00e9", "e\u0301", "名", "\U0001f600", "\ud800", "1", "01", "-1", "-0", "0", "CON"],  # the first two look alike
]
keys = st.sampled_from(AWKWARD_KEYS) | st.text(max_size=5) | st.integers(-(10**20), 10**20)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(collections.OrderedDict),
        st.builds(Step, children, children),
    )


nests = st.recursive(st.none() | st.integers(), containers, max_leaves=12)


def plain_leaves(nest: Any) -> list[Any]:
    """The leaves in optree's order, found the long way."""
    if nest is None:
        return []
    if isinstance(nest, dict):
        same_kind = len({type(key) for key in nest}) <= 1
        order = list(nest)
        if type(nest) is dict:
            order.sort(key=None if same_kind else lambda key: (type(key).__name__, key))
        return [leaf for key in order for leaf in plain_leaves(nest[key])]
    if isinstance(nest, tuple | list):
        return [leaf for child in nest for leaf in plain_leaves(child)]
    return [nest]


@given(nests)
def test_flatten_gives_the_leaves_in_order_and_unflatten_puts_them_back(nest: Any) -> None:
    structure = Structure(nest)
    leaves = structure.flatten(nest)
    assert leaves == plain_leaves(nest)
    assert len(leaves) == structure.num_leaves == len(structure.keys) == len(structure.paths)
    back = structure.unflatten(leaves)
    assert repr(back) == repr(nest)  # repr shows the order of dict keys and the class of each container


@given(nests)
def test_the_keys_lead_to_the_leaves(nest: Any) -> None:
    structure = Structure(nest)
    for way, leaf in zip(structure.keys, structure.flatten(nest), strict=True):
        node = nest
        for key in way:
            node = getattr(node, key) if isinstance(node, Step) else node[key]
        assert node is leaf


@given(nests)
def test_a_structure_comes_back_from_json_with_its_leaves_in_the_same_order(nest: Any) -> None:
    structure = Structure(nest)
    back = Structure.from_json(json.loads(json.dumps(structure.to_json(), allow_nan=False)))
    assert back == structure
    assert hash(back) == hash(structure)
    assert back.keys == structure.keys
    assert back.file_paths == structure.file_paths
    assert back.to_json() == structure.to_json()
    leaves = structure.flatten(nest)
    assert repr(back.unflatten(leaves)) == repr(nest)


@given(nests, nests)
def test_the_slow_way_to_flatten_agrees_with_the_fast_one(expected: Any, items: Any) -> None:
    structure = Structure(expected)
    try:
        fast = structure.treespec.flatten_up_to(items)
    except ValueError:
        with pytest.raises(SpecError):
            structure.flatten(items)
        return
    if any(Structure(leaf).paths != ("",) for leaf in fast):
        with pytest.raises(SpecError):
            structure.flatten(items)
    else:
        assert structure.flatten(items) == fast
        assert not compare(structure.unflatten(range(structure.num_leaves)), items)[1]


def test_the_order_of_keys_matters_to_an_ordereddict_alone() -> None:
    assert Structure({"a": 0, "b": 0}) == Structure({"b": 1, "a": 1})
    assert Structure(collections.OrderedDict(a=0, b=0)) != Structure(collections.OrderedDict(b=0, a=0))
    assert Structure((0,)) != Structure([0])
    assert Structure(0) != "array"


@given(nests)
def test_file_paths_are_distinct_and_legal(nest: Any) -> None:
    file_paths = Structure(nest).file_paths
    assert len(set(file_paths)) == len(file_paths)
    for name in (name for path in file_paths for name in path.split("/")):
        assert name.isascii()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.%")
        assert name.strip(".")
        assert not name.startswith(("__", "."))
        assert name != "zarr.json"


@given(st.text())
def test_a_file_name_can_be_turned_back_into_its_key(key: str) -> None:
    (file_path,) = Structure({key: 0}).file_paths
    assert urllib.parse.unquote(file_path, errors="strict") == (key or "%")


@pytest.mark.parametrize(
    ("nest", "file_path"),
    [
        (0, "data"),
        ({"observation": {"Camera_1-a.b": 0}}, "observation/Camera_1-a.b"),
        (((), (0,)), "1/0"),
        (Step(0, None), "observation"),
        ({1: 0}, "1"),
        ({-7: 0}, "-7"),
        ({"1": 0}, "%31"),
        ({"-7": 0}, "%2D7"),
        ({"01": 0}, "01"),
        ({"": 0}, "%"),
        ({"a/b": 0}, "a%2Fb"),
        ({"a\\b": 0}, "a%5Cb"),
        ({"%": 0}, "%25"),
        ({"a b\0": 0}, "a%20b%00"),
        ({"é": 0}, "%C3%A9"),
        ({".": 0}, "%2E"),
        ({"..": 0}, "%2E%2E"),
        ({"...": 0}, "%2E.%2E"),
        ({".diskbuf": 0}, "%2Ediskbuf"),
        ({"__a": 0}, "%5F_a"),
        ({"zarr.json": 0}, "%7Aarr.json"),
    ],
)
def test_the_file_path_of_a_leaf_is(nest: Any, file_path: str) -> None:
    assert Structure(nest).file_paths == (file_path,)


def test_zarr_takes_every_awkward_key_as_a_node_of_its_own(tmp_path: Any) -> None:
    nest = {key: {"inner": index} for index, key in enumerate([*AWKWARD_KEYS, 1, 0, -1])}
    structure = Structure(nest)
    group = zarr.open_group(tmp_path / "store.zarr", mode="w", zarr_format=3)
    for path, value in zip(structure.file_paths, structure.flatten(nest), strict=True):
        group.create_array(path, shape=(), dtype="int64")[...] = value
    again = zarr.open_group(tmp_path / "store.zarr", mode="r")
    assert [int(again[path][()]) for path in structure.file_paths] == structure.flatten(nest)  # type: ignore[index,arg-type]
    assert len(list((tmp_path / "store.zarr").glob("*/inner/zarr.json"))) == len(nest)


@pytest.mark.parametrize("key", [(1, 2), True, None, 1.5, b"a", np.int64(1), np.str_("a")])
def test_a_dict_key_that_is_neither_str_nor_int_is_refused(key: Any) -> None:
    with pytest.raises(SpecError, match=r"must be a str or an int, got .* at 'a'. Use .* instead"):
        Structure({"a": {key: ()}})


def test_what_is_no_container_is_a_leaf() -> None:
    class MyDict(dict[str, int]):
        pass

    for leaf in [MyDict(a=1), collections.deque([1]), np.zeros(3), "text", {1, 2}, sys.version_info]:
        assert Structure(leaf).paths == ("",)
        assert Structure({"a": leaf}).flatten({"a": leaf}) == [leaf]


def test_none_and_empty_containers_have_no_leaves() -> None:
    nest: Any = {"a": None, "b": (), "c": [], "d": {}, "e": collections.OrderedDict()}
    structure = Structure(nest)
    assert structure.num_leaves == 0
    assert structure.flatten(nest) == []
    assert structure.unflatten([]) == nest


def test_any_kind_of_dict_fits_a_dict() -> None:
    structure = Structure({"b": 0, "a": 0})
    assert structure.flatten(collections.OrderedDict(b=1, a=2)) == [2, 1]
    assert structure.flatten(collections.defaultdict(int, b=1, a=2)) == [2, 1]
    assert Structure(collections.OrderedDict(b=0, a=0)).flatten({"a": 2, "b": 1}) == [1, 2]


def test_a_defaultdict_is_read_back_as_a_dict() -> None:
    structure = Structure(collections.defaultdict(int, a=1))
    assert type(Structure.from_json(structure.to_json()).unflatten([1])) is dict


@pytest.mark.parametrize("wrap", [lambda step: step, lambda step: {"a": [step]}])
def test_a_namedtuple_of_an_equal_class_fits(wrap: Callable[[Any], Any]) -> None:
    theirs = another_class("Step", "observation reward")
    assert Structure(wrap(Step(0, (0,)))).flatten(wrap(theirs(1, (2,)))) == [1, 2]


def test_items_of_different_classes_can_take_turns() -> None:
    theirs = another_class("Step", "observation reward")
    structure = Structure({"a": Step(0, 0), "b": 0})
    for _ in range(3):
        assert structure.flatten(collections.OrderedDict(b=3, a=theirs(1, 2))) == [1, 2, 3]
        assert structure.flatten(collections.OrderedDict(a=theirs(1, 2), b=3)) == [1, 2, 3]
        assert structure.flatten({"b": 3, "a": theirs(1, 2)}) == [1, 2, 3]
        assert structure.flatten({"b": 3, "a": Step(1, 2)}) == [1, 2, 3]
        with pytest.raises(SpecError, match="items at 'a' must be"):
            structure.flatten({"b": 3, "a": Info(1, 2)})
    assert type(structure.unflatten([1, 2, 3])["a"]) is Step


@pytest.mark.parametrize(
    "items",
    [
        Info(1, 2),
        another_class("Step", "reward observation")(1, 2),
        another_class("Step", "observation reward done")(1, 2, 3),
        (1, 2),
        {"observation": 1, "reward": 2},
    ],
)
def test_a_namedtuple_of_an_unequal_class_does_not_fit(items: Any) -> None:
    with pytest.raises(SpecError, match=r"items must be Step\(observation=array, reward=array\), got "):
        Structure(Step(0, 0)).flatten(items)


ROW = np.zeros((8, 3), "float32")


@pytest.mark.parametrize(
    ("expected", "items", "path", "message"),
    [
        (0, (ROW,), None, r"^items must be an array, got \(float32 \[8, 3\],\)\. Remove the extra tuple around it\.$"),
        (0, None, None, r"^items must be an array, got None\. Pass one array\.$"),
        (0, [1, 2], None, r"^items must be an array, got \[int, int\]\. Pass one array; numpy.asarray makes one"),
        ({"a": 0}, ({"a": ROW},), None, r"^items must be {'a': array}, got .*\. Remove the extra tuple around it\.$"),
        ((0,), ROW, None, r"^items must be \(array,\), got float32 \[8, 3\]\. Wrap it in a tuple of one\.$"),
        (
            {"a": 0, "b": (0, 0)},
            {"a": ROW},
            "b",
            r"^items at 'b' must be \(array, array\), got nothing\. Add the key 'b'\.$",
        ),
        (
            {"a": 0},
            {"a": ROW, "c": ROW},
            "c",
            r"^items at 'c' must be nothing, got float32 \[8, 3\]\. Leave the key 'c' out\.$",
        ),
        (
            {"observation": {"camera": 0}},
            {"observation": {"camrea": ROW}},
            "observation/camera",
            (
                r"^items at 'observation/camera' must be an array, got nothing; "
                r"items at 'observation/camrea' must be nothing, got float32 \[8, 3\]\. Add the key 'camera'\.$"
            ),
        ),
        (
            {"action": 0, "policy_info": {"logits": 0}},
            {"action": ROW, "policy_info": ()},
            "policy_info",
            (
                r"^items at 'policy_info' must be {'logits': array}, got \(\)\. "
                r"Fill it in, or have \(\) in the data_spec too\.$"
            ),
        ),
        (
            {"action": 0, "policy_info": ()},
            {"action": ROW, "policy_info": {"logits": ROW}},
            "policy_info",
            (
                r"^items at 'policy_info' must be \(\), got {'logits': float32 \[8, 3\]}\. "
                r"Pass \(\), or give the data_spec leaves to hold it\.$"
            ),
        ),
        ((0, 0), [ROW, ROW], None, r"got \[float32 \[8, 3\], float32 \[8, 3\]\]\. Convert it with tuple\(\.\.\.\)\.$"),
        ([0, 0], (ROW, ROW), None, r"Convert it with list\(\.\.\.\)\.$"),
        ((0, 0), Step(ROW, ROW), None, r"^items must be \(array, array\), got Step\(.*\)\. Convert it with tuple"),
        (Step(0, 0), (ROW, ROW), None, r"Convert it with Step\(\*\.\.\.\)\.$"),
        (Step(0, 0), Info(ROW, ROW), None, r"got Info\(.*\)\. Pass a Step\.$"),
        (Step(0, 0), ROW, None, r"Pass a Step of 2\.$"),
        ((0, 0), (ROW, ROW, ROW), None, r"Pass a tuple of 2\.$"),
        ({"a": 0, "b": 0}, (ROW, ROW), None, r"Pass a dict with these keys\.$"),
        ({f"k{i}": 0 for i in range(5)}, {"k0": ROW}, "k1", r"must be an array, got nothing; and 1 more\. Add the key"),
    ],
)
def test_flatten_says_what_was_expected_what_came_and_how_to_mend_it(
    expected: Any, items: Any, path: str | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        Structure(expected).flatten(items)
    assert raised.value.path == path


def test_describe_is_short_for_any_nest() -> None:
    assert describe({"a": np.zeros((2, 3), "uint8"), "b": [1, None, ()]}) == "{'a': uint8 [2, 3], 'b': [int, None, ()]}"
    assert describe(list(range(100))) == "[int, int, int, int, int, int, int, int, ...]"
    deep: Any = 0
    for _ in range(100):
        deep = {"a": deep}
    assert describe(deep) == "{'a': {'a': {'a': {'a': {'a': {...}}}}}}"


def test_a_namedtuple_class_is_found_again() -> None:
    back = Structure.from_json(Structure(Step(0, 0)).to_json())
    assert type(back.unflatten([1, 2])) is Step


def namedtuple_json(module: str, qualname: str, *fields: str) -> dict[str, Any]:
    items = ["leaf"] * len(fields)
    return {"type": "namedtuple", "module": module, "qualname": qualname, "fields": list(fields), "items": items}


@pytest.mark.parametrize(
    ("module", "qualname", "fields"),
    [
        ("no_such_module_at_all", "Step", ["a", "b"]),
        ("no.such.module", "Outer.Step", ["a"]),
        ("", "Step", ["a"]),
        ("..relative", "Step", ["a"]),
        ("os", "system", ["command"]),
        ("collections", "OrderedDict", ["a"]),
        (__name__, "Step", ["observation"]),
        (__name__, "another_class", ["name", "fields"]),
        (__name__, "test_it.<locals>.Step", ["_0", "_1"]),
    ],
)
def test_a_namedtuple_class_that_cannot_be_imported_is_made_once(module: str, qualname: str, fields: list[str]) -> None:
    value = namedtuple_json(module, qualname, *fields)
    structure = Structure.from_json(value)
    assert structure == Structure.from_json(copy.deepcopy(value))
    assert structure.to_json() == value
    step = structure.unflatten(range(len(fields)))
    assert type(step).__name__ == qualname.rpartition(".")[2]
    assert step._asdict() == dict(zip(fields, range(len(fields)), strict=True))
    assert structure.flatten(step) == list(range(len(fields)))


def test_an_instance_of_a_made_class_can_be_pickled_and_copied() -> None:
    step = Structure.from_json(namedtuple_json("nowhere", "make.<locals>.Step", "a", "b")).unflatten([1, [2]])
    for back in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step), copy.copy(step), step._replace(a=1)):
        assert back == step
        assert type(back) is type(step)


def test_a_module_that_fails_or_exits_at_import_is_no_obstacle(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in [("fails_at_import", "1 / 0"), ("exits_at_import", "raise SystemExit(3)")]:
        (tmp_path / f"{name}.py").write_text(body)
        assert Structure.from_json(namedtuple_json(name, "Step", "a")).paths == ("a",)


def test_a_class_is_found_in_an_imported_module_and_no_module_is_imported_for_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "import typing\nclass Outer:\n    class Step(typing.NamedTuple):\n        a: int\n"
    (tmp_path / "has_a_step.py").write_text(code)
    value = namedtuple_json("has_a_step", "Outer.Step", "a")
    made = Structure.from_json(value).unflatten([1])
    assert "has_a_step" not in sys.modules
    module = importlib.import_module("has_a_step")
    monkeypatch.setitem(sys.modules, "has_a_step", module)  # forgotten again afterwards
    step = Structure.from_json(value).unflatten([1])
    assert type(step) is module.Outer.Step
    assert step == made


def test_a_class_of_diskbuf_is_found_whether_it_is_imported_or_not() -> None:
    value = Structure(TimeStep(1, 2, 3, 4)).to_json()
    code = f"from diskbuf.tree import Structure; print(type(Structure.from_json({value!r}).unflatten(range(4))))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out == f"{TimeStep}\n"


def test_nothing_is_called_to_find_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("has_a_function")
    module.Step = lambda *_: pytest.fail("called")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "has_a_function", module)
    assert Structure.from_json(namedtuple_json("has_a_function", "Step", "a")).paths == ("a",)


@pytest.mark.parametrize(
    "value",
    [
        *["", "leaves", 3, True, [], {}, {"type": "tuple"}],
        *[{"type": kind, "items": []} for kind in ("set", "", None, ["tuple"])],
        *[{"type": "tuple", "items": items} for items in ({}, ["nest"], "leaf", [1])],
        *[{"type": "dict", "items": items} for items in ([["a"]], ["ab"], {"a": "leaf"})],
        *[{"type": "dict", "items": [[key, "leaf"]]} for key in (1.5, True, None, [])],
        {"type": "dict", "items": [["a", "leaf"], ["a", "leaf"]]},
        {"type": "namedtuple", "items": []},
        {**namedtuple_json("m", "Step", "a"), "module": None},
        {**namedtuple_json("m", "Step", "a"), "fields": "a"},
        {**namedtuple_json("m", "Step", "a"), "fields": [1]},
        {**namedtuple_json("m", "Step", "a"), "fields": ["a", "b"]},
        namedtuple_json("m", "Step", "a", "a"),
        namedtuple_json("m", "Step", "not an identifier"),
        namedtuple_json("m", "Step", "_private"),
        namedtuple_json("m", "Step", "def"),
        namedtuple_json("m", "not an identifier", "a"),
        namedtuple_json("m", "", "a"),
    ],
)
def test_json_that_to_json_did_not_write_is_refused(value: Any) -> None:
    with pytest.raises(StoreFormatError, match=r"must be what Structure.to_json writes, got "):
        Structure.from_json(value)


def test_json_nested_too_deeply_is_refused() -> None:
    value: Any = "leaf"
    for _ in range(100_000):
        value = {"type": "tuple", "items": [value]}
    with pytest.raises(StoreFormatError, match="can't be read"):
        Structure.from_json(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("leaf"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "items", "module", "qualname", "fields"]), inner)
        | st.fixed_dictionaries(
            {
                "type": st.sampled_from(["tuple", "list", "dict", "OrderedDict", "namedtuple"]),
                "items": st.lists(inner, max_size=3),
            },
            optional={"module": st.just("m"), "qualname": inner, "fields": st.lists(st.text(max_size=2))},
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_no_json_raises_anything_but_a_format_error(value: Any) -> None:
    try:
        structure = Structure.from_json(value)
    except StoreFormatError:
        return
    assert Structure.from_json(structure.to_json()) == structure
