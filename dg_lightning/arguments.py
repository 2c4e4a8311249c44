"""Check arguments against their annotations, with one-line errors that name the argument."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from math import isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")

_WORDS: dict[Any, str] = {
    NoneType: "None",
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "a non-empty string",
}


def checked(init: Callable[P, None]) -> Callable[P, None]:
    """Check a constructor's arguments against their annotations.

    Numbers must be finite. Strings, lists and dicts must not be empty.

    >>> class Every:
    ...     @checked
    ...     def __init__(self, n_steps: int = 1) -> None: ...
    >>> Every(n_steps=2.5)
    Traceback (most recent call last):
    ...
    ValueError: `n_steps` must be an integer, got 2.5.
    """
    signature = inspect.signature(init)

    @wraps(init)
    def checking(*args: P.args, **kwargs: P.kwargs) -> None:
        _check(init, signature.bind(*args, **kwargs).arguments)
        init(*args, **kwargs)

    return checking


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept the old names of arguments for one release, with a DeprecationWarning.

    >>> @renamed(only="layers")
    ... def add(layers: list[str]) -> list[str]:
    ...     return layers
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(add(only=["3"]), caught[0].message)
    ['3'] `only` was renamed to `layers`: the next release drops the old name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> T:
            for old, new in names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"`{old}` was renamed to `{new}`: pass only one of them.")
                    warnings.warn(
                        f"`{old}` was renamed to `{new}`: the next release drops the old name.",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return accepting

    return decorate


def percent(text: str) -> float | None:
    """Convert text such as "30%" to a fraction. Return None for any other text.

    >>> percent("30%"), percent("5 %"), percent("30")
    (0.3, 0.05, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return None if match is None else float(match[1]) / 100


def warn_of_fraction(name: str, value: float, stacklevel: int = 3) -> None:
    """Warn about a fraction given as a float, which is easily mistaken for a count."""
    warnings.warn(
        f"`{name}={value}` is a fraction: write it as '{100 * value:g}%'.",
        FutureWarning,  # which users see by default
        stacklevel,
    )


def check_fields(instance: Any) -> None:
    """Check a dataclass's fields against their annotations."""
    _check(type(instance), vars(instance))


def as_dataclass(name: str, value: Any, kind: type[T]) -> T:
    """Return `value` as an instance of the dataclass `kind`, converting a dict of fields."""
    if isinstance(value, kind):
        return value
    try:
        return kind(**value)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
        raise ValueError(f"`{name}` takes {known}, got {', '.join(map(str, value))}.") from error


def _check(annotated: Any, values: Mapping[str, Any]) -> None:
    hints = _hints(annotated)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"`{name}` must be {_words(hints[name])}, got {value!r}.")


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind is list:
        items = value if isinstance(value, list | tuple) else ()
        return bool(items) and all(_fits(item, inner[0]) for item in items)
    if kind is dict:
        pairs = value.items() if isinstance(value, dict) else ()
        return bool(pairs) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in pairs)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if dataclasses.is_dataclass(hint):  # configs pass dataclasses as dicts of fields
        return isinstance(value, dict | hint)
    if hint is str:
        return isinstance(value, str) and bool(value)
    return hint not in _WORDS or isinstance(value, hint)


def _words(hint: Any) -> str:
    """Describe the values that an annotation allows."""
    *most, last = _alternatives(hint)
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(hint: Any) -> list[str]:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return [words for one in inner for words in _alternatives(one)]
    if kind is Literal:
        return [str(one) for one in inner]
    if kind is list:
        return [f"a non-empty list, with each item {_words(inner[0])}"]
    if kind is dict:
        return [f"a non-empty dict, with each value {_words(inner[1])}"]
    return [_WORDS.get(hint, f"a {getattr(hint, '__name__', hint)}")]
