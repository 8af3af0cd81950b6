"""Whatever is wrong with a TOML is one line that says where and what to write instead."""

import pytest
from support import ADS, as_toml, raw, recipe

from adumbra import schema, toml
from adumbra.config import Config
from adumbra.errors import InputError


def message(text, tmp_path, tree=schema.Recipe):
    path = tmp_path / "recipe.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        toml.parse(toml.read(path), tree, str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_survives_the_round_trip(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(ADS))
    assert toml.read(path) == ADS
    assert schema.load(path) == recipe()


@pytest.mark.parametrize(
    ("broken", "hint"),
    [
        (raw() | {"colums": []}, "unknown key 'colums' (did you mean 'columns'?)"),
        (raw(source={"heder": True}), "unknown key 'source.heder' (did you mean 'header'?)"),
        (raw(public={"treshold": 3}), "unknown key 'public.treshold' (did you mean 'threshold'?)"),
        (
            raw(column={"price": {"bounds": {"low": 0, "hihg": 1}}}),
            "unknown key 'columns.'price'.bounds.hihg' (did you mean 'high'?)",
        ),
        (raw(column={"price": {"bounds": "count"}}), "columns.'price'.bounds: should be 'counted', got 'count'"),
        (raw(column={"price": {"bounds": {"low": 0}}}), "'columns.'price'.bounds.high' is missing"),
        (raw(column={"site": {"rol": "public"}}), "unknown key 'columns.'site'.rol' (did you mean 'role'?)"),
        (raw(source=None), "'source' is missing"),
        (raw(public={"threshold": "many"}), "public.threshold: should be a valid integer"),
        (raw(public={"threshold": 0}), "public.threshold"),
    ],
)
def test_keys_and_values_are_named_with_the_nearest_valid_one(tmp_path, broken, hint):
    assert hint in message(as_toml(broken), tmp_path)


@pytest.mark.parametrize("text", ["", "a = ", b"\xff\xfe", "[" * 5000, "x = 1\nx = 2", "schema_version = 1"])
def test_what_is_no_recipe_is_one_line(tmp_path, text):
    message(text, tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "place", ["[split]\nkind = 'random'\ntrain = {}", "[log]\nshift = {}", "[counts]\ndelta = 1e-9\nepsilon = {}"]
)
def test_no_number_is_infinite_or_nan(tmp_path, place, value):
    section = place.split("\n")[0].strip("[]")
    assert section in message(as_toml(raw(**{section: None})) + place.format(value), tmp_path)


def test_a_folder_or_no_file_at_all(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(InputError, match=str(path)):
            toml.read(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp_phase.epochs=3", {"dp_phase": {"epochs": 3}}),
        ("privacy.delta=1/n", {"privacy": {"delta": "1/n"}}),
        ("data.store = 'a b'", {"data": {"store": "a b"}}),
        ("seed=", {"seed": ""}),
    ],
)
def test_set_takes_toml_or_else_text(text, expected):
    tree = {}
    toml.change(tree, text)
    assert tree == expected


def changed(tree, text):
    toml.change(tree, text)
    return tree


@pytest.mark.parametrize("text", ["epochs", "=3", "seed.x=1", "seed=" + "[" * 5000])
def test_set_refuses_the_rest_in_one_line(text):
    tree = {"seed": 1, "data": {"store": "s"}, "privacy": {"epsilon": 1}}
    with pytest.raises(InputError) as caught:
        toml.parse(changed(tree, text), Config, "adumbra.toml")
    assert "\n" not in str(caught.value)
