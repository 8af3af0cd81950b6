"""What has been spent: an append-only file that survives a crash and shows when it was changed.

Each line is one JSON object that ends in a digest of itself and of all lines before it. The digest has no key: it finds
damage and careless edits, not a forger who recomputes the chain. Nor can a file alone show that its last lines were
cut off whole; `head`, kept elsewhere (the store's `store.json`), can.
"""

import fcntl
import hashlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from adumbra.errors import InputError, WorkError
from adumbra.privacy.adjacency import Adjacency, Unit

FORMAT = 1
_MARK = b',"digest":"'
_CLOSE = len(_MARK) + 64 + len('"}')  # bytes that follow a line's body
_TOLERANCE = 1e-9  # relative: three charges of .1 fit a budget of .3


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Charge:
    """One release and what it cost. `mechanism` and `parameters` suffice to account for it again."""

    mechanism: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    accountant: str
    parameters: dict[str, Any]
    note: str = ""
    run: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    time: str = field(default_factory=_now)

    def __post_init__(self) -> None:
        try:
            clean: dict[str, Any] = {
                "epsilon": float(self.epsilon),
                "delta": float(self.delta),
                "adjacency": Adjacency(self.adjacency),
                "unit": Unit(self.unit),
                "parameters": json.loads(json.dumps(self.parameters, allow_nan=False)),
            }
        except (TypeError, ValueError) as error:
            raise InputError(f"not a charge: {error}") from None
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0 and 0 <= self.delta <= 1):
            raise InputError(
                f"not a charge: epsilon ≥ 0 and 0 ≤ delta ≤ 1 are expected, not {self.epsilon}, {self.delta}"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Charge":
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"not a charge: {error}") from None


def total(charges: Iterable[Charge]) -> tuple[float, float]:
    """(Σε, Σδ): what holds across runs, whose later ones were chosen having seen the earlier (privacy.md rule 21)."""
    charges = list(charges)
    return math.fsum(c.epsilon for c in charges), min(1.0, math.fsum(c.delta for c in charges))


class Head(NamedTuple):
    """The last line's number (the header is 0) and its digest."""

    sequence: int
    digest: str


class Ledger:
    """The ledger of one store or one run, open at `path`. Appends of several processes exclude one another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired: str | None = None
        self.budget: tuple[float, float] | None = None
        self.charges: list[Charge] = []
        self.id = ""
        self._digests: list[str] = []
        self._size = 0  # bytes read and verified

    @classmethod
    def create(cls, path: str | Path) -> "Ledger":
        path = Path(path)
        header = {"seq": 0, "kind": "ledger", "format": FORMAT, "id": uuid.uuid4().hex, "created": _now()}
        try:
            # Written beside its place and linked into it, so that a ledger without a header never exists.
            fd, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
            try:
                with open(fd, "wb") as file:
                    file.write(_line(header, ""))
                    file.flush()
                    os.fsync(fd)
                os.link(draft, path)
            finally:
                os.unlink(draft)
            _sync_folder(path.parent)
        except FileExistsError:
            raise InputError(f"{path}: a ledger is there already") from None
        except OSError as error:
            raise WorkError(f"{path}: cannot create the ledger: {error.strerror}") from None
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path, expected_head: Head | None = None) -> "Ledger":
        """Read and verify. A last line that was never finished is cut off, and `repaired` says so; whatever else is
        wrong is refused, as is a ledger that does not hold `expected_head`.
        """
        ledger = cls(Path(path))
        with ledger._locked(reading=True) as fd:
            ledger._catch_up(fd)
        if expected_head is not None:
            sequence, digest = expected_head
            if sequence >= len(ledger._digests):
                raise InputError(
                    f"{path}: line {sequence + 1} is missing: the ledger held it once, and its end has been cut off"
                )
            if ledger._digests[sequence] != digest:
                raise InputError(f"{path}: line {sequence + 1} is not the line that was once written there")
        return ledger

    @property
    def head(self) -> Head:
        return Head(len(self._digests) - 1, self._digests[-1])

    def total(self) -> tuple[float, float]:
        return total(self.charges)

    def append(self, charge: Charge) -> None:
        """Record `charge` on disk. Only after this returns may what it pays for be computed."""
        with self._locked() as fd:
            self._catch_up(fd)
            if any(charge.id == c.id for c in self.charges):
                raise InputError(f"{self.path}: charge {charge.id} is in the ledger already")
            self.check_budget(charge.epsilon, charge.delta)
            self._write(fd, {"kind": "charge", "charge": charge.to_json()})

    def set_budget(self, epsilon: float, delta: float) -> None:
        """From here on no charge is taken that brings the total above (epsilon, delta). The last budget holds."""
        if not (math.isfinite(epsilon) and epsilon >= 0 and 0 <= delta <= 1):
            raise InputError(f"a budget needs a finite epsilon ≥ 0 and 0 ≤ delta ≤ 1, not {epsilon}, {delta}")
        with self._locked() as fd:
            self._catch_up(fd)
            self._write(fd, {"kind": "budget", "epsilon": float(epsilon), "delta": float(delta), "time": _now()})

    def check_budget(self, epsilon: float, delta: float) -> None:
        """Refuse what a run would spend before it starts, as far as this ledger has been read."""
        if self.budget is None:
            return
        spent = self.total()
        for name, asked, used, limit in zip(("epsilon", "delta"), (epsilon, delta), spent, self.budget, strict=True):
            if used + asked > limit * (1 + _TOLERANCE):
                raise InputError(
                    f"{self.path}: {name} {asked:.6g} does not fit the budget of {limit:.6g}, "
                    f"of which {used:.6g} is spent"
                )

    @contextmanager
    def _locked(self, *, reading: bool = False) -> Iterator[int]:
        try:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_APPEND)
            except OSError:
                if not reading:
                    raise
                fd = os.open(self.path, os.O_RDONLY)  # what lies on a read-only disk can still be read
        except OSError as error:
            raise InputError(f"{self.path}: cannot open the ledger: {error.strerror}") from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                raise WorkError(f"{self.path}: cannot lock the ledger: {error.strerror}") from None
            yield fd
        finally:
            os.close(fd)  # and with it the lock

    def _catch_up(self, fd: int) -> None:
        """Verify and take in what was written since `_size`. Under the lock, so an unfinished line is a crash's."""
        size = os.fstat(fd).st_size
        if size < self._size:
            raise InputError(f"{self.path}: line {len(self._digests)} is missing: the ledger has become shorter")
        text = _read(fd, self._size, size)
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._take(line)
            self._size += len(line) + 1
        if not self._digests:
            raise InputError(f"{self.path}: line 1 is not a ledger's header")
        if rest:
            self._repair(fd, rest)

    def _repair(self, fd: int, rest: bytes) -> None:
        """`rest` has no newline. A crash leaves the beginning of a line, perhaps all of it, but nothing after it."""
        number = len(self._digests) + 1
        whole = rest[: rest.rfind(_MARK) + _CLOSE]
        intact = self._digest_of(whole) is not None
        if intact and rest != whole:
            raise InputError(f"{self.path}: line {number} was changed after its end")
        try:
            if intact:
                os.write(fd, b"\n")
            else:
                os.ftruncate(fd, self._size)
            os.fsync(fd)
        except OSError as error:
            raise WorkError(f"{self.path}: cannot repair line {number}: {error.strerror}") from None
        if intact:
            self._take(rest)
            self._size += len(rest) + 1
        self.repaired = f"line {number} was never finished and has been " + ("completed" if intact else "cut off")

    def _digest_of(self, line: bytes) -> str | None:
        """The digest that the next line must end in, if `line` does."""
        digest = _digest(self._digests[-1] if self._digests else "", line[:-_CLOSE])
        return digest if line[-_CLOSE:] == _close(digest) else None

    def _take(self, line: bytes) -> None:
        """Verify the next line and apply it."""
        number = len(self._digests) + 1
        digest = self._digest_of(line)
        if digest is None:
            raise InputError(f"{self.path}: line {number} or one before it was changed, moved or lost")
        try:
            self._apply(number, json.loads(line[:-_CLOSE] + b"}"))
        except InputError as error:
            raise InputError(f"{self.path}: line {number}: {error}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.path}: line {number} cannot be read") from None
        self._digests.append(digest)

    def _apply(self, number: int, entry: dict[str, Any]) -> None:
        if entry["seq"] != number - 1:
            raise InputError(f"its number is {entry['seq']}")
        match number, entry["kind"]:
            case 1, "ledger" if entry["format"] == FORMAT:
                self.id = entry["id"]
            case 1, _:
                raise InputError(f"not the header of a ledger of format {FORMAT}")
            case _, "charge":
                self.charges.append(Charge.from_json(entry["charge"]))
            case _, "budget":
                self.budget = float(entry["epsilon"]), float(entry["delta"])
            case _, kind:
                raise InputError(f"of a kind that this version does not know: {kind}")

    def _write(self, fd: int, entry: dict[str, Any]) -> None:
        line = _line({"seq": len(self._digests), **entry}, self._digests[-1])
        try:
            written = os.write(fd, line)
            if written < len(line):
                raise OSError(0, "the disk took only a part of the line")
            os.fsync(fd)
        except OSError as error:
            with suppress(OSError):  # if even this fails, the next to open finds an unfinished line and cuts it off
                os.ftruncate(fd, self._size)
                os.fsync(fd)
            raise WorkError(f"{self.path}: nothing was charged: cannot write the ledger: {error.strerror}") from None
        self._take(line[:-1])
        self._size += len(line)


def _line(entry: dict[str, Any], previous: str) -> bytes:
    body = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + _close(_digest(previous, body)) + b"\n"


def _digest(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()


def _close(digest: str) -> bytes:
    return _MARK + digest.encode() + b'"}'


def _read(fd: int, start: int, stop: int) -> bytes:
    parts: list[bytes] = []
    while start < stop and (part := os.pread(fd, stop - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
