"""Roles without default, rules that read what is public alone, and the recipes that ship."""

import pytest
from support import ADS, VOCABULARY, as_toml, raw, recipe

from adumbra import schema
from adumbra.errors import InputError


def refused(base=ADS, **changes):
    with pytest.raises(InputError) as caught:
        recipe(base, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_role_is_ever_assumed():
    for blank in ("", None):
        broken = raw()
        broken["columns"][1]["role"] = blank
        assert "no role was chosen" in refused(broken)
    missing = raw()
    del missing["columns"][1]["role"]
    assert "'columns.'site'.role' is missing" in refused(missing)
    assert "did you mean 'public'" in refused(column={"site": {"role": "publc"}})


def test_a_column_is_declared_once():
    broken = raw()
    broken["columns"].append(broken["columns"][1])
    assert "column 'site' is declared twice" in refused(broken)


@pytest.mark.parametrize("name", ["clicked", "interest", "recency"])
def test_which_rows_exist_is_decided_by_public_columns_alone(name):
    """privacy.md, rule 2."""
    told = refused(filter=f"visits > 1 and {name} == 1")
    assert f"reads '{name}'" in told
    assert "public columns and keys only" in told
    assert recipe(filter="visits > 1 and user != '' and time > 0")


@pytest.mark.parametrize("by", ["interest", "sensitive", "clicked", "label", "site"])
def test_no_split_reads_a_protected_column(by):
    for kind in ("random", "chronological"):
        assert "by" in refused(split={"kind": kind, "by": by})


def test_a_key_that_no_column_holds():
    assert "no column has that role" in refused(split={"kind": "random", "by": "publisher"})
    assert "two columns have the role user" in refused(column={"site": {"role": "user"}})


@pytest.mark.parametrize(
    "rule", ["clicked +", "unknown", "clicked = 1", "segments == 'x'", "", "__import__('os')", "clicked ** 2"]
)
def test_label_rules(rule):
    assert "label.rule" in refused(label={"rule": rule}) or "rule" in refused(label={"rule": rule})


@pytest.mark.parametrize(
    ("kind", "default", "good"),
    [
        *[("binary", 1, True), ("count", 7, True), ("real", -2.5, True)],
        *[("binary", 2, False), ("binary", 0.5, False)],
        *[("count", -1, False), ("count", 0.5, False), ("count", 2**24, False)],
    ],
)
def test_a_default_label_is_a_label(kind, default, good):
    label = {"rule": "clicked", "kind": kind, "default": default}
    assert recipe(label=label) if good else "default" in refused(label=label)


@pytest.mark.parametrize(
    "changes",
    [
        {"column": {"site": {"as": "log"}}},
        {"column": {"site": {"as": []}}},
        {"column": {"site": {"as": ["token", "token"]}}},
        {"column": {"visits": {"as": ["token", "drop"]}}},
        {"column": {"visits": {"as": "bucket"}}},
        {"column": {"visits": {"as": "bucket", "edges": [1, 1]}}},
        {"column": {"price": {"bounds": {"low": 1, "high": 1}}}},
        {"column": {"segments": {"separator": "||"}}},
        {"column": {"site": {"type": "list"}}},
        {"column": {"user": {"type": "list", "length": 2}}},
        {"column": {"time": {"type": "category"}}},
        {"column": {"clicked": {"feature": "public"}}},
        {"column": {"site": {"feature": "sensitive"}}},
        {"column": {"site": {"values": ["a", "a"]}}},
        {"column": {"price": {"values": ["1"]}}},
        {"column": {"visits": {"name": "time.hour"}}},
        {"public": None},
        {"public": {"kind": "hash"}},
        {"public": {"kind": "vocabulary", "bins": 3}},
        {"sensitive": {"kind": "hash", "table": "column", "bins": 2**30}},
        {"sensitive": VOCABULARY["sensitive"]},
        {"split": {"kind": "random", "train": 0.5, "test": 0.4}},
        {"split": {"kind": "random", "train": 0.0, "test": 1.0}},
        {"split": {"kind": "files", "train": 0.5, "test": 0.5}},
        {"split": {"kind": "random", "train": "a", "test": "b"}},
        {"log": {"minimum": -1.0, "shift": 1.0}},
        {"schema_version": 2},
        {"columns": []},
    ],
    ids=str,
)
def test_what_does_not_fit_together(changes):
    refused(**changes)


def test_another_version_is_named():
    assert "schema_version is 2" in refused(schema_version=2)
    assert "schema_version" in refused(schema_version=None)


def test_names_of_several_derivations():
    assert [feature.name for feature in recipe().features][-2:] == ["time.hour", "time.weekday"]


@pytest.mark.parametrize("name", schema.shipped())
def test_every_recipe_that_ships_is_whole(name, tmp_path):
    assert schema.load(name).name == name
    (tmp_path / "copy.toml").write_text(schema.text(name))
    assert schema.load(tmp_path / "copy.toml") == schema.load(name)


SENSITIVE = """wage_per_hour capital_gains capital_losses dividends_from_stocks tax_filer_stat weeks_worked_in_year
num_persons_worked_for_employer own_business_or_self_employed race hispanic_origin sex marital_stat
detailed_household_and_family_stat detailed_household_summary_in_household citizenship country_of_birth_father
country_of_birth_mother country_of_birth_self veterans_benefits fill_inc_questionnaire_for_veterans_admin"""


@pytest.mark.parametrize(
    ("name", "public", "sensitive"),
    [
        ("criteo-display", 20, 19),
        ("criteo-display-dnn", 0, 39),
        ("criteo-display-labels", 39, 0),
        ("criteo-search", 17, 3),
        ("criteo-attribution", 11, 0),
        ("census-income", 20, 20),
    ],
)
def test_towers_of_the_recipes(name, public, sensitive):
    features = schema.load(name).features
    assert sum(f.tower == "public" for f in features) == public
    assert sum(f.tower == "sensitive" for f in features) == sensitive


def test_what_the_issue_fixes_of_the_recipes():
    display = schema.load("criteo-display")
    for number, column in enumerate(display.columns):
        assert column.role == ("label" if number == 0 else "sensitive" if number % 2 == 0 else "public")
    assert {f.column.name for f in schema.load("census-income").features if f.tower == "sensitive"} == set(
        SENSITIVE.split()
    )
    search = schema.load("criteo-search")
    assert {f.name for f in search.features if f.tower == "sensitive"} == {"device_type", "audience_id", "user_id"}
    assert (search.public.bins, search.sensitive.bins) == (100_000, 50_000)
    attribution = schema.load("criteo-attribution")
    assert [f.name for f in attribution.features] == ["campaign", "cost", *(f"cat{n}" for n in range(1, 10))]
    assert attribution.expect.rows == 5_947_563
    assert attribution.key("user").name == "uid"
    assert attribution.key("publisher") is None


def test_an_unknown_recipe(tmp_path):
    with pytest.raises(InputError, match="did you mean 'criteo-display'"):
        schema.load("criteo-displai")
    (tmp_path / "other.toml").write_text(as_toml(raw(schema_version=9)))
    with pytest.raises(InputError, match="schema_version is 9"):
        schema.load(tmp_path / "other.toml")
