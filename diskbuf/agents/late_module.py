"""A base class that becomes a `tf.Module` when the first object is made, not when it is imported."""

import functools
import types
from typing import Any, Self


class LateModule:
    """What derives from this derives from `tf.Module` too, as soon as there is an object of it.

    `tf.train.Checkpoint` takes a `tf.Module`, but a class statement that names it imports TensorFlow, which takes
    seconds. So the class of an object is made on the way, from the one that was called and `tf.Module`, under the name
    of the one that was called. A subclass calls `_begin_module` before it sets attributes.
    """

    def __new__(cls, *_args: Any, **_arguments: Any) -> Self:
        """Makes an object of the class and of `tf.Module`."""
        bare: Any = cls
        made: Self = object.__new__(_as_module(bare))
        return made

    def _begin_module(self, name: str | None) -> None:
        import tensorflow as tf

        tf.Module.__init__(self, name=name)


@functools.cache
def _as_module(cls: type[Any]) -> type[Any]:
    import tensorflow as tf

    if issubclass(cls, tf.Module):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls, tf.Module), exec_body=lambda body: body.update(names))
