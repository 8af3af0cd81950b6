"""Which logs count as neighbours, and what one protected unit is."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting.privacy_accountant import NeighboringRelation


class Adjacency(StrEnum):
    REPLACE_SENSITIVE = "replace-sensitive"
    REPLACE_EXAMPLE = "replace-example"
    ZERO_OUT = "zero-out"
    ADD_OR_REMOVE = "add-or-remove"

    @property
    def sentence(self) -> str:
        """The relation in plain words, as the statement gives it."""
        return _SENTENCES[self]

    @property
    def replaces(self) -> bool:
        """Whether a unit's values are replaced by others (the loss of two contributions, not one)."""
        return self in (Adjacency.REPLACE_SENSITIVE, Adjacency.REPLACE_EXAMPLE)

    def relation(self) -> "NeighboringRelation":
        """dp-accounting's name for it."""
        from dp_accounting.privacy_accountant import NeighboringRelation

        if self.replaces:
            return NeighboringRelation.REPLACE_ONE
        if self is Adjacency.ZERO_OUT:
            return NeighboringRelation.REPLACE_SPECIAL
        return NeighboringRelation.ADD_OR_REMOVE_ONE


_SENTENCES = {
    Adjacency.REPLACE_SENSITIVE: (
        "Two logs are neighbours if they differ in the sensitive features and the label of one unit; "
        "public features, keys and the number of units are taken as known."
    ),
    Adjacency.REPLACE_EXAMPLE: (
        "Two logs are neighbours if they differ in one unit's features and label, public features included; "
        "keys and the number of units are taken as known."
    ),
    Adjacency.ZERO_OUT: (
        "Two logs are neighbours if one of them holds, in place of one unit, an empty unit that contributes nothing; "
        "the number of units is taken as known."
    ),
    Adjacency.ADD_OR_REMOVE: "Two logs are neighbours if one of them holds one unit more than the other.",
}


class Unit(StrEnum):
    """What one protected unit is: everything that belongs to it is protected together."""

    IMPRESSION = "impression"
    USER = "user"
    USER_PUBLISHER = "user-publisher"
    USER_ADVERTISER = "user-advertiser"

    def covers(self, claim: "Unit") -> bool:
        """Whether what was spent at this unit may back a claim at `claim`: a finer unit never backs a coarser one."""
        return self in (claim, Unit.USER) or claim is Unit.IMPRESSION
