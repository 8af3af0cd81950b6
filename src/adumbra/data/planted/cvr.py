"""Sales after clicks on product ads, in the form of the Criteo Sponsored Search Conversion Log (-1 is missing).

A product decides its brand, its seven nested categories, its title, country, partner and price; how often it is clicked
follows from how popular it is. Sensitive: the device, the audience and the user.

The truth: hidden attributes of values. The logit is a saturated, drifting sum of them, a saturating curve of the
clicks of the week whose half-way point depends on the partner's segment, the hour against the hour that the product
likes best, how far the audience's taste lies from the category's, and threshold rules over three columns.

Price and amount are known after the label, as in the real log (a price is seen for nearly all sales and few others).
"""

import numpy as np

from . import Column, Knobs, Rows, World
from .lines import MISSING, Cell, decimals, digits, hex32, sign
from .truth import Array, Draws, PowerLaw, attribute, hashed, mix, odds, powers, saturate, unit

START, DAYS = 1_596_439_471, 90
PRODUCTS = PowerLaw(6_000_000, 4, 4.0)
USERS_PER_ROW = 0.9
WORDS = 8
SHARES = {  # of the rows, or of the products, that have a value
    "product_age_group": 0.26, "device_type": 0.9995, "audience_id": 0.28, "product_gender": 0.27,
    "product_brand": 0.56, "product_country": 0.87, "product_title": 0.62, "partner_id": 1.0,
}  # fmt: skip
DEPTHS = (0.62, 0.62, 0.55, 0.36, 0.14, 0.02, 0.001)
BRANCHES = (21, 8, 6, 5, 4, 3, 2)


def columns(_: Knobs) -> list[Column]:
    return [
        Column("Sale", "label", "integer"),
        Column("SalesAmountInEuro", "outcome", "real"),
        Column("time_delay_for_conversion", "outcome", "integer"),
        Column("click_timestamp", "public", "timestamp"),
        Column("nb_clicks_1week", "public", "integer"),
        Column("product_price", "outcome", "real"),
        Column("product_age_group", "public", "category"),
        Column("device_type", "sensitive", "category"),
        Column("audience_id", "sensitive", "category"),
        Column("product_gender", "public", "category"),
        Column("product_brand", "public", "category"),
        *(Column(f"product_category_{i}", "public", "category") for i in range(1, 8)),
        Column("product_country", "public", "category"),
        Column("product_id", "public", "category"),
        Column("product_title", "public", "category"),
        Column("partner_id", "public", "category"),
        Column("user_id", "sensitive", "category"),
    ]


def draw(d: Draws, index: Array, rows: int, knobs: Knobs) -> Rows:
    def of(source: Array, name: str, law: PowerLaw) -> Array:
        """The value that `source` has in the column `name`."""
        law = PowerLaw(knobs.values(law.values), law.flatness, law.shift)
        return mix(law.ranks(hashed(source, name)), name)

    def has(source: Array, name: str, share: float) -> Array:
        return unit(hashed(source, name + "?")) >= min(0.98, (1.0 - share) * knobs.missing)

    second = DAYS * 86_400 * index // rows
    products = PowerLaw(knobs.values(PRODUCTS.values), PRODUCTS.flatness, PRODUCTS.shift)
    rank = products.ranks(d.bits())
    value = {"product_id": mix(rank, "product_id")}
    product = value["product_id"]
    partner = value["partner_id"] = of(product, "partner_id", PowerLaw(312, 2, 3.0))
    value["product_country"] = of(partner, "product_country", PowerLaw(20, 1))
    value["product_brand"] = of(product, "product_brand", PowerLaw(55_000, 3, 4.0))
    value["product_age_group"] = of(product, "product_age_group", PowerLaw(11, 0))
    value["product_gender"] = of(product, "product_gender", PowerLaw(16, 0))
    above = partner
    for i, branches in enumerate(BRANCHES, 1):
        name = f"product_category_{i}"
        branch = of(product, name, PowerLaw(branches, 1))
        above = value[name] = mix(branch ^ above, name) if i > 1 else branch
    here = {name: has(product, name, share) for name, share in SHARES.items()}
    depth = unit(hashed(product, "depth"))
    for i, share in enumerate(DEPTHS, 1):
        here[f"product_category_{i}"] = depth >= min(0.98, (1.0 - share) * knobs.missing)

    users = PowerLaw(knobs.values(max(2, int(USERS_PER_ROW * rows))), 1, 0.1 * rows + 1.0)
    user = value["user_id"] = mix(users.ranks(d.bits()), "user_id")
    value["device_type"] = of(user, "device_type", PowerLaw(5, 1))
    value["audience_id"] = of(user, "audience_id", PowerLaw(12_000, 2, 2.0))
    for name in ("device_type", "audience_id"):
        here[name] = has(user, name, SHARES[name])
    clicks = np.minimum(20.0 * odds(d.uniform()) * (1.0 + 200.0 / (rank + 10.0)), 60_000).astype(np.uint32)
    clicked = ~d.coin(min(0.98, 0.42 * knobs.missing))

    a = {name: attribute(v) * here[name] if name in here else attribute(v) for name, v in value.items()}
    hour = (START + second) // 3600 % 24
    drift = (index / rows - 0.5) * knobs.drift
    curve = np.where(clicked, saturate(clicks, np.where(a["partner_id"] > 0, 8.0, 60.0)), 0.2)
    away = np.abs(hour - (a["product_category_1"] + 1.0) * 12.0)
    public = 1.1 * a["partner_id"] + 0.7 * a["product_category_1"] + 0.6 * a["product_category_2"]
    public += 0.6 * a["product_brand"] + 0.5 * a["product_country"] + 0.6 * a["product_age_group"]
    public += 0.4 * a["product_category_3"] + 0.5 * a["product_gender"] + 0.25 * a["product_id"]
    public += drift * (np.abs(a["partner_id"]) + np.abs(a["product_brand"]))
    public = 4.0 * saturate(public, 4.0) + 1.5 * curve - 0.05 * np.minimum(away, 24.0 - away)
    public += 0.9 * ((a["partner_id"] > -0.3) & (a["product_brand"] >= 0) & (a["product_category_2"] < 0.3))
    sensitive = 1.2 * a["device_type"] + 1.2 * a["audience_id"] + 0.15 * a["user_id"]
    sensitive -= 1.0 * np.abs(a["audience_id"] - a["product_category_1"]) * here["audience_id"]
    sensitive -= 0.8 * np.abs(a["device_type"] - a["partner_id"])
    sensitive += 0.9 * ((a["device_type"] > 0) & (a["product_country"] > 0) & (curve > 0.5))

    cents = np.minimum(3000.0 * odds(unit(hashed(product, "price"))), 2e6).astype(np.uint32) + 99
    luck, delays, amounts = d.uniform(), d.uniform(), d.uniform()

    def cells(label: Array) -> list[Cell]:
        sale = label > 0
        delay = (1500.0 * powers(odds(0.976 * delays), 2.0)).astype(np.uint32)  # below 30 days
        amount = (cents * (0.8 + amounts)).astype(np.uint32)
        priced = luck < np.where(sale, 0.97, 0.25)
        text = {name: hex32(v, here.get(name)) for name, v in value.items()}
        text["Sale"] = digits(label)
        text["SalesAmountInEuro"] = decimals(amount, 2, sale, missing=MISSING)
        text["time_delay_for_conversion"] = digits(delay, sale, missing=MISSING)
        text["click_timestamp"] = digits(START + second)
        text["nb_clicks_1week"] = digits(clicks, clicked, missing=MISSING)
        text["product_price"] = decimals(cents * priced, 2)
        text["product_title"] = _title(product, here["product_title"])
        return [text[column.name] for column in columns(knobs)]

    return Rows(public, sensitive, None, cells)


def _title(product: Array, here: Array) -> Cell:
    """2 to WORDS words of 32 characters with spaces between them."""
    count = 2.0 + unit(hashed(product, "words")) * (WORDS - 1)
    cell = hex32(mix(PowerLaw(300_000, 3, 8.0).ranks(hashed(product, "word 0")), "word"), here)
    for i in range(1, WORDS):
        more = here & (count > i + 1)
        cell.append(sign(more, mark=b" "))
        word = mix(PowerLaw(300_000, 3, 8.0).ranks(hashed(product, f"word {i}")), "word")
        cell += hex32(word, more, missing=0)
    return cell


WORLD = World("cvr", columns, draw, Knobs(positive_rate=0.108, bayes_auc=0.79, sensitive_share=0.3))
