"""The words blocks, features and sections speak: a strict config, a setting, an environment variable."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Value = bool | int | float | str | tuple | None

# Platforms force a value, which is slower at worst where a plan wants it unset.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# One line of text that stays one word on a command line and one comment in a script.
Name = Annotated[
    str,
    Field(
        min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f-\xa0\u2028\u2029-][^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
    ),
]


class Config(BaseModel):
    """A piece of the recipe: frozen, strict (`"8"`, `true` and `52.0` are not integers), no unknown keys.

    Fields have no defaults in Python: every value stands in a YAML file, where a person can read it.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing Megatron is told.

    name: the argument's destination in Megatron's parser (`hidden_size`); None as value pins "not given".
    why: one clause. key: the recipe key that decides it, None where the owner pins it. owner: who sets it.
    """

    name: str
    value: Value
    why: str
    key: str | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Env:
    """One environment variable of the training processes; value None means it must be unset."""

    name: str
    value: str | None
    why: str
    owner: str = ""

    def allows(self, here: str | None) -> bool:
        """Whether a process may run with `here`, None where the variable is not set. Platforms may force CONNECTIONS."""
        return here == self.value or (self.value is None and self.name == CONNECTIONS)
