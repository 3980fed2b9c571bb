"""config.json taken out key by key: what is missing is named, what is assumed is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.spec import LayerKind

__all__ = ["HINT", "Fields", "describe"]

HINT = "take config.json as the model's authors published it; kvtriage does not guess a geometry"

_LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 4096,
    "mtp_num_hidden_layers": 4096,
    "num_mtp_modules": 4096,
    "num_attention_heads": 65536,
    "num_key_value_heads": 65536,
    "head_dim": 65536,
    "global_head_dim": 65536,
    "swa_head_dim": 65536,
    "v_head_dim": 65536,
    "swa_v_head_dim": 65536,
    "sparse_index_dim": 65536,
    "swa_num_attention_heads": 65536,
    "hidden_size": 2**20,
    "image_size": 2**16,
    "max_num_tiles": 2**10,
}
_LARGEST_OTHERWISE = 2**40

_LAYER_TYPES: Mapping[str, LayerKind] = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
}


@dataclass(frozen=True)
class Fields:
    """The keys of one object in config.json, and the `architecture` that gives them their meaning.

    `documented` are the values that the architecture's documentation gives to absent keys.
    `spellings` are the architecture's own words for a key, its own one last: {"num_hidden_layers": ("n_layer",)}.
    `assumed` collects, in order, every value that config.json did not state; objects inside this one write to the
    same list.
    """

    architecture: str
    config: Mapping[str, object]
    prefix: str = ""
    documented: Mapping[str, int] = field(default_factory=dict)
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def with_documented(self, documented: Mapping[str, int]) -> Fields:
        """The same keys, with defaults for some more that may be absent."""
        return replace(self, documented={**self.documented, **documented})

    def spelled(self, spellings: Mapping[str, tuple[str, ...]]) -> Fields:
        """The same keys, where the architecture has words of its own for some; errors name the word that is there."""
        return replace(self, spellings=spellings)

    def inside(self, key: str, inherited: Sequence[str] = ()) -> Fields:
        """The keys of the object under `key`, which may leave the `inherited` ones to this one.

        Raises ModelError when there is no such object.
        """
        value = self.config.get(key)
        if value is None:
            raise self._missing(key)
        found = self._object(key, value)
        left_to_this = {word: self.config[word] for word in inherited if word in self.config}
        return replace(found, config={**left_to_this, **found.config})

    def stated(self, key: str) -> int | None:
        """A positive whole number; None where it is null, or absent and not documented.

        Raises ModelError, naming the key, for anything else, and where two spellings contradict each other.
        """
        words = [word for word in self._words(key) if word in self.config]
        if not words and key in self.documented:
            self.assume(self._words(key)[-1], self.documented[key], f"the default of {self.architecture}")
            return self.documented[key]
        numbers = {word: number for word in words if (number := self._number(word, _largest(key))) is not None}
        if len(set(numbers.values())) > 1:
            both = " and ".join(f"{self.prefix}{word} {number}" for word, number in numbers.items())
            raise ModelError(f"config.json contradicts itself: it states {both}", hint=HINT)
        return next(iter(numbers.values()), None)

    def require(self, key: str) -> int:
        """A positive whole number that must be there. Raises ModelError, naming the key."""
        value = self.stated(key)
        if value is None:
            raise self._missing(self._words(key)[-1])
        return value

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is 0 where it is null or absent. Raises ModelError for anything else."""
        value = self.config.get(key)
        return 0 if type(value) is int and value == 0 else self.stated(key) or 0

    def derive(self, key: str, value: int, because: str) -> int:
        """The stated number or else `value`, which is then recorded as assumed."""
        found = self.stated(key)
        if found is None:
            self.assume(self._words(key)[-1], value, because)
            return value
        return found

    def window(self) -> int | None:
        """sliding_window; None where there is none: null, 0, or absent and not documented.

        vLLM 0.32 reads a 0 so (config/model.py:802).
        """
        return self.count("sliding_window") or None

    def switch(self, key: str, *, absent: bool) -> bool:
        """A switch that decides what is kept: where config.json leaves it out, its documented position is recorded."""
        if key in self.config:
            return self.flag(key)
        self.assume(key, str(absent).lower(), f"the default of {self.architecture}")
        return absent

    def flag(self, key: str) -> bool:
        """A switch that is off unless config.json turns it on."""
        value = self.config.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string that must be there. Raises ModelError, naming the key."""
        value = self.config.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            raise self._wrong(key, value, "a short text")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of words, one a layer; None where it is null or absent. Raises ModelError for anything else."""
        value = self._entries(key)
        if value is None or all(isinstance(entry, str) for entry in value):
            return None if value is None else tuple(str(entry) for entry in value)
        raise self._wrong(key, value, "a list of words")

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers from 0, one a layer; None where it is null or absent. Raises ModelError."""
        value = self._entries(key)
        if value is None:
            return None
        found = tuple(
            entry
            for entry in value
            if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= _LARGEST_OTHERWISE
        )
        if len(found) != len(value):
            raise self._wrong(key, value, "a list of whole numbers from 0")
        return found

    def indices(self, key: str) -> frozenset[int] | None:
        """As `numbers`, in any order."""
        found = self.numbers(key)
        return None if found is None else frozenset(found)

    def layer_types(
        self, num_layers: int, names: Mapping[str, LayerKind] = _LAYER_TYPES
    ) -> tuple[LayerKind, ...] | None:
        """The kind of each layer, L in all; None when `layer_types` is absent or null.

        `names` are the words that the architecture has for its kinds. Raises ModelError for another length
        and UnsupportedModel for a word that is not among them.
        """
        value = self._entry_per_layer("layer_types", num_layers)
        return None if value is None else tuple(self._layer_type(entry, names) for entry in value)

    def flags(self, key: str, num_layers: int) -> tuple[bool, ...] | None:
        """A list of zeros and ones, L in all; None where it is null or absent. Raises ModelError for anything else."""
        value = self._entry_per_layer(key, num_layers)
        if value is None:
            return None
        if any(type(entry) is not int or entry not in (0, 1) for entry in value):
            raise self._wrong(key, value, "a list of zeros and ones")
        return tuple(entry == 1 for entry in value)

    def objects(self, key: str, num_layers: int) -> tuple[Fields, ...]:
        """A list of objects, L in all, that must be there. Raises ModelError, naming the key."""
        value = self._entry_per_layer(key, num_layers)
        if value is None:
            raise self._missing(key)
        return tuple(self._object(f"{key}[{index}]", entry) for index, entry in enumerate(value))

    def assume(self, key: str, value: object, because: str) -> None:
        """Write down a value that config.json does not state."""
        self.assumed.append(f"{self.prefix}{key} = {value} ({because})")

    def unsupported(self, reason: str) -> UnsupportedModel:
        """A refusal that names the architecture; `reason` names the key."""
        return UnsupportedModel(
            f"{self.architecture}: {reason}",
            hint="kvtriage prices what it can read with certainty and refuses the rest",
        )

    def _object(self, name: str, value: object) -> Fields:
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return replace(self, config=value, prefix=f"{self.prefix}{name}.", documented={}, spellings={})

    def _entry_per_layer(self, key: str, num_layers: int) -> Sequence[object] | None:
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, value, "a list")
        if len(value) != num_layers:
            raise ModelError(
                f"{self.prefix}{key} in config.json has {len(value)} entries for {num_layers} layers", hint=HINT
            )
        return value

    def _layer_type(self, entry: object, names: Mapping[str, LayerKind]) -> LayerKind:
        if isinstance(entry, str) and entry in names:
            return names[entry]
        raise self.unsupported(f"{self.prefix}layer_types has {describe(entry)}, which kvtriage does not read yet")

    def _entries(self, key: str) -> Sequence[object] | None:
        """A list that is not longer than a model has layers."""
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(key, value, "a list")
        most = _LARGEST["num_hidden_layers"]
        if len(value) > most:
            raise ModelError(f"{self.prefix}{key} in config.json has {len(value)} entries, more than {most}", hint=HINT)
        return value

    def _words(self, key: str) -> tuple[str, ...]:
        return (key, *self.spellings.get(key, ()))

    def _number(self, word: str, largest: int) -> int | None:
        value = self.config[word]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise self._wrong(word, value, f"a whole number from 1 to {largest}")
        return value

    def _missing(self, key: str) -> ModelError:
        return ModelError(f"config.json does not state {self.prefix}{key}, which {self.architecture} needs", hint=HINT)

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.prefix}{key} in config.json is {describe(value)}, not {wanted}", hint=HINT)


def _largest(key: str) -> int:
    return _LARGEST.get(key, _LARGEST_OTHERWISE)


def describe(value: object) -> str:
    """Any JSON value in a few printable characters, however large, deep or strange it is."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value) if abs(value) < 10**15 else "an enormous number"
        case float():
            return str(value)
        case str():
            return ascii(value if len(value) <= 60 else f"{value[:60]}...")
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
        case _:
            return f"a {type(value).__name__}"
