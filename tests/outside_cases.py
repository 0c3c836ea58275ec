"""What a step can read from outside its arguments, and how it changes between two calls.

Each case is a generator: what it yields is called within the step, which multiplies the loss by the
number it gives; what follows the `yield` is the change.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import operator
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn import functional as F

import outside_constants
from outside_constants import IMPORTED  # noqa: F401 - a case reads it as a global

Case = Callable[[], Iterator[Callable[[], Any]]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Config:
    """A plain object."""

    of_class = 0.5

    def __init__(self, beta: float = 0.5, **more: Any) -> None:
        self.beta = beta
        vars(self).update(more)

    def method(self) -> float:
        return self.beta

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]


class Child(Config):
    def method(self) -> float:
        return super().method() * 2


number = 0.5
flag = True
text = "0.5"
numbers = [0.5, 1.5]
table = {"beta": 0.5}
pair = (0.5, 1.0)
config = Config()


# Names


@case
def global_number() -> Iterator[Any]:
    global number
    number = 0.5
    yield lambda: number
    number = 0.7


@case
def global_flag() -> Iterator[Any]:
    global flag
    flag = True
    yield lambda: 1.0 if flag else 0.5
    flag = False


@case
def global_text() -> Iterator[Any]:
    global text
    text = "0.5"
    yield lambda: float(text)
    text = "0.7"


@case
def global_tuple() -> Iterator[Any]:
    global pair
    pair = (0.5, 1.0)
    yield lambda: pair[0]
    pair = (0.7, 1.0)


@case
def global_deleted() -> Iterator[Any]:
    globals()["passing"] = 0.5
    yield lambda: globals().get("passing", 0.7)
    del globals()["passing"]


@case
def global_hides_a_builtin() -> Iterator[Any]:
    globals().pop("abs", None)
    yield lambda: float(abs(-0.5))
    globals()["abs"] = lambda value: 0.7


@case
def closure() -> Iterator[Any]:
    beta = 0.5
    yield lambda: beta
    beta = 0.7


@case
def nested_closure() -> Iterator[Any]:
    beta = 0.5

    def outer() -> float:
        def inner() -> float:
            return beta

        return inner()

    yield outer
    beta = 0.7


@case
def nonlocal_set_by_a_function() -> Iterator[Any]:
    beta = 0.5

    def change() -> None:
        nonlocal beta
        beta = 0.7

    yield lambda: beta
    change()


@case
def constant_of_another_module() -> Iterator[Any]:
    outside_constants.SCALE = 0.5
    yield lambda: outside_constants.SCALE
    outside_constants.SCALE = 0.7


@case
def constant_read_by_a_function_of_another_module() -> Iterator[Any]:
    outside_constants.SCALE = 0.5
    yield outside_constants.scale
    outside_constants.SCALE = 0.7


@case
def imported_name() -> Iterator[Any]:
    global IMPORTED
    IMPORTED = 0.5
    yield lambda: IMPORTED
    IMPORTED = 0.7


@case
def import_within_the_step() -> Iterator[Any]:
    outside_constants.SCALE = 0.5

    def read() -> float:
        from outside_constants import SCALE

        return SCALE

    yield read
    outside_constants.SCALE = 0.7


# Containers


@case
def list_item() -> Iterator[Any]:
    values = [0.5, 1.0]
    yield lambda: values[0]
    values[0] = 0.7


@case
def last_item_of_a_longer_list() -> Iterator[Any]:
    values = [0.1, 0.5]
    yield lambda: values[-1]
    values.append(0.7)


@case
def length_of_a_list() -> Iterator[Any]:
    values = [1]
    yield lambda: float(len(values))
    values.append(1)


@case
def emptiness_of_a_list() -> Iterator[Any]:
    values: list[int] = []
    yield lambda: 1.0 if values else 0.5
    values.append(1)


@case
def negated_emptiness() -> Iterator[Any]:
    values: dict[str, int] = {}
    yield lambda: 0.5 + (not values)
    values["a"] = 1


@case
def loop_over_a_list() -> Iterator[Any]:
    values = [0.5, 1.0]

    def read() -> float:
        total = 0.0
        for value in values:
            total += value
        return total

    yield read
    values[1] = 1.2


@case
def sum_of_a_list() -> Iterator[Any]:
    values = [0.5, 1.0]
    yield lambda: sum(values)
    values[0] = 0.7


@case
def sorted_pairs() -> Iterator[Any]:
    values = [(0.5, 1), (1.0, 2)]
    yield lambda: sorted(values, key=lambda v: v[1])[0][0]
    values.append((0.7, 0))


@case
def comprehension_over_a_list() -> Iterator[Any]:
    values = [0.5, 1.0]
    yield lambda: max([v * 2 for v in values])
    values[1] = 1.2


@case
def generator_over_a_list() -> Iterator[Any]:
    values = [0.5, 1.0]
    yield lambda: sum(v * 2 for v in values)
    values[1] = 1.2


@case
def unpacked_list() -> Iterator[Any]:
    values = [0.5, 1.0]

    def read() -> float:
        first, *_ = values
        return first

    yield read
    values[0] = 0.7


@case
def slice_of_a_list() -> Iterator[Any]:
    values = [0.5, 1.0, 2.0]
    yield lambda: sum(values[:2])
    values[1] = 1.2


@case
def list_of_lists() -> Iterator[Any]:
    values = [[0.5, 1.0], [2.0, 3.0]]
    yield lambda: float(torch.Size([len(v) for v in values]).numel()) + values[1][0]
    values[1][0] = 2.5


@case
def concatenated_lists() -> Iterator[Any]:
    values = [0.5]
    yield lambda: ([0.1] + values + values)[1]  # noqa: RUF005
    values[0] = 0.7


@case
def compared_lists() -> Iterator[Any]:
    values = [1, 2]
    yield lambda: 1.0 if values == [1, 2] else 0.5
    values[0] = 3


@case
def star_arguments() -> Iterator[Any]:
    values = [0.5, 1.0]
    yield lambda: operator.mul(*values)
    values[0] = 0.7


@case
def star_keywords() -> Iterator[Any]:
    options = {"beta": 0.5}
    yield lambda: Config(**options).beta
    options["beta"] = 0.7


@case
def dictionary_item() -> Iterator[Any]:
    values = {"beta": 0.5}
    yield lambda: values["beta"]
    values["beta"] = 0.7


@case
def dictionary_get() -> Iterator[Any]:
    values: dict[str, float] = {}
    yield lambda: values.get("beta", 0.5)
    values["beta"] = 0.7


@case
def dictionary_contains() -> Iterator[Any]:
    values: dict[str, float] = {}
    yield lambda: 1.0 if "beta" in values else 0.5
    values["beta"] = 0.0


@case
def dictionary_items() -> Iterator[Any]:
    values = {"a": 0.5, "b": 1.0}
    yield lambda: sum(v for k, v in values.items() if k != "a")
    values["b"] = 1.2


@case
def order_of_a_dictionary() -> Iterator[Any]:
    values = {"a": 0.5, "b": 1.0}
    yield lambda: values[next(iter(values))]
    values["a"] = values.pop("a")


@case
def nested_dictionary() -> Iterator[Any]:
    outside_constants.FACTORS["a"]["b"][0] = 0.5
    yield lambda: outside_constants.FACTORS["a"]["b"][0]
    outside_constants.FACTORS["a"]["b"][0] = 0.7


@case
def default_dictionary() -> Iterator[Any]:
    values: dict[str, float] = collections.defaultdict(float, beta=0.5)
    yield lambda: values["beta"]
    values["beta"] = 0.7


@case
def chained_maps() -> Iterator[Any]:
    first: dict[str, float] = {}
    values = collections.ChainMap(first, {"beta": 0.5})
    yield lambda: values["beta"]
    first["beta"] = 0.7


@case
def member_of_a_set() -> Iterator[Any]:
    values = {"a"}
    yield lambda: 1.0 if "b" in values else 0.5
    values.add("b")


@case
def double_ended_queue() -> Iterator[Any]:
    values = collections.deque([0.5], maxlen=1)
    yield lambda: values[0]
    values.append(0.7)


@case
def mapped_list() -> Iterator[Any]:
    values = ["0.5"]
    yield lambda: sum(map(float, values))
    values[0] = "0.7"


@case
def numpy_array() -> Iterator[Any]:
    values = numpy.array([0.5, 1.0])
    yield lambda: float(values[0])
    values[0] = 0.7


@case
def operator_itemgetter() -> Iterator[Any]:
    values, getter = {"beta": 0.5}, operator.itemgetter("beta")
    yield lambda: getter(values)
    values["beta"] = 0.7


# Attributes


@case
def attribute() -> Iterator[Any]:
    config.beta = 0.5
    yield lambda: config.beta
    config.beta = 0.7


@case
def attribute_of_an_attribute() -> Iterator[Any]:
    outer = Config(inner=Config())
    yield lambda: outer.inner.beta
    outer.inner.beta = 0.7


@case
def object_replaced() -> Iterator[Any]:
    outer = Config(inner=Config())
    yield lambda: outer.inner.beta
    outer.inner = Config(0.7)


@case
def attribute_added() -> Iterator[Any]:
    cfg = Config()
    yield lambda: getattr(cfg, "gamma", 0.5)
    cfg.gamma = 0.7


@case
def attribute_asked_for() -> Iterator[Any]:
    cfg = Config()
    yield lambda: 1.0 if hasattr(cfg, "gamma") else 0.5
    cfg.gamma = None


@case
def attribute_of_the_class() -> Iterator[Any]:
    Config.of_class = 0.5
    cfg = Config()
    yield lambda: cfg.of_class
    Config.of_class = 0.7


@case
def class_attribute_hidden_by_the_object() -> Iterator[Any]:
    Config.of_class = 0.5
    cfg = Config()
    yield lambda: cfg.of_class
    cfg.of_class = 0.7


@case
def attribute_of_a_class_itself() -> Iterator[Any]:
    Config.of_class = 0.5
    yield lambda: Child.of_class
    Config.of_class = 0.7
    yield
    del Config.of_class


@case
def attribute_through_super() -> Iterator[Any]:
    cfg = Child()
    yield cfg.method
    cfg.beta = 0.7


@case
def method_replaced() -> Iterator[Any]:
    class Local(Config):
        def method(self) -> float:
            return 0.5

    cfg = Local()
    yield lambda: cfg.method()
    Local.method = lambda self: 0.7


@case
def method_of_a_base_class_replaced() -> Iterator[Any]:
    class Base:
        def method(self) -> float:
            return 0.5

    class Derived(Base):
        pass

    cfg = Derived()
    yield lambda: cfg.method()
    Base.method = lambda self: 0.7


@case
def method_replaced_in_the_object() -> Iterator[Any]:
    cfg = Config()
    yield lambda: cfg.method()
    cfg.method = lambda: 0.7


@case
def attribute_of_an_object_made_by_the_step() -> Iterator[Any]:
    class Local:
        beta = 0.5

    yield lambda: Local().beta
    Local.beta = 0.7


@case
def property_of_an_object() -> Iterator[Any]:
    class Local:
        hidden = 0.5

        @property
        def beta(self) -> float:
            return self.hidden * 2

    cfg = Local()
    yield lambda: cfg.beta
    cfg.hidden = 0.7


@case
def cached_property() -> Iterator[Any]:
    class Local:
        hidden = 0.5

        @functools.cached_property
        def beta(self) -> float:
            return self.hidden * 2

    cfg = Local()
    yield lambda: cfg.beta
    cfg.hidden = 0.7
    del cfg.beta


@case
def descriptor() -> Iterator[Any]:
    class Twice:
        def __get__(self, instance: Any, owner: Any) -> float:
            return instance.hidden * 2

    class Local:
        beta = Twice()
        hidden = 0.5

    cfg = Local()
    yield lambda: cfg.beta
    cfg.hidden = 0.7


@case
def missing_attribute() -> Iterator[Any]:
    class Local:
        def __init__(self) -> None:
            self.values = {"beta": 0.5}

        def __getattr__(self, name: str) -> Any:
            return self.values[name]

    cfg = Local()
    yield lambda: cfg.beta
    cfg.values["beta"] = 0.7


@case
def any_attribute() -> Iterator[Any]:
    class Local:
        def __init__(self) -> None:
            self.beta = 0.5

        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name)

    cfg = Local()
    yield lambda: cfg.beta
    cfg.beta = 0.7


@case
def slots() -> Iterator[Any]:
    class Local:
        __slots__ = ("beta",)

    cfg = Local()
    cfg.beta = 0.5
    yield lambda: cfg.beta
    cfg.beta = 0.7


@dataclasses.dataclass
class Options:
    beta: float = 0.5
    values: list[float] = dataclasses.field(default_factory=lambda: [1.0])


@case
def data_class() -> Iterator[Any]:
    cfg = Options()
    yield lambda: cfg.beta * cfg.values[0]
    cfg.values[0] = 1.2


@case
def data_class_as_a_dictionary() -> Iterator[Any]:
    cfg = Options()
    yield lambda: dataclasses.asdict(cfg)["beta"]
    cfg.beta = 0.7


@case
def data_class_replaced() -> Iterator[Any]:
    cfg = Options()
    yield lambda: dataclasses.replace(cfg, values=[]).beta
    cfg.beta = 0.7


@case
def compared_data_classes() -> Iterator[Any]:
    cfg = Options()
    yield lambda: 1.0 if cfg == Options() else 0.5
    cfg.beta = 0.7


class Point(NamedTuple):
    x: float
    y: float


@case
def named_tuple() -> Iterator[Any]:
    point = Point(0.5, 1.0)
    yield lambda: point.x
    point = point._replace(x=0.7)


class Mode(enum.Enum):
    FAST = 0.5
    SLOW = 0.7


@case
def enumeration_member() -> Iterator[Any]:
    mode = Mode.FAST
    yield lambda: mode.value
    mode = Mode.SLOW


@case
def enumeration_compared() -> Iterator[Any]:
    cfg = Config(mode=Mode.FAST)
    yield lambda: 1.0 if cfg.mode is Mode.FAST else 0.5
    cfg.mode = Mode.SLOW


@case
def simple_namespace() -> Iterator[Any]:
    cfg = types.SimpleNamespace(beta=0.5)
    yield lambda: cfg.beta
    cfg.beta = 0.7


@case
def parsed_arguments() -> Iterator[Any]:
    args = argparse.Namespace(beta=0.5)
    yield lambda: vars(args)["beta"]
    args.beta = 0.7


@case
def item_of_an_object() -> Iterator[Any]:
    cfg = Config()
    yield lambda: cfg["beta"]
    cfg.beta = 0.7


@case
def objects_in_a_list() -> Iterator[Any]:
    layers = [Config(0.5), Config(1.0)]

    def read() -> float:
        total = 0.0
        for layer in layers:
            total += layer.beta
        return total

    yield read
    layers[1].beta = 1.2


@case
def object_from_a_function() -> Iterator[Any]:
    cfg = Config()

    def get_config() -> Config:
        return cfg

    def read() -> float:
        found = get_config()
        return found.beta

    yield read
    cfg.beta = 0.7


@case
def object_from_a_conditional_expression() -> Iterator[Any]:
    cfg = Config()
    yield lambda: (cfg if cfg else None).beta
    cfg.beta = 0.7


@case
def matched_class() -> Iterator[Any]:
    cfg = Options()

    def read() -> float:
        match cfg:
            case Options(beta=beta):
                return beta
        return 0.0

    yield read
    cfg.beta = 0.7


@case
def matched_mapping() -> Iterator[Any]:
    options = {"beta": 0.5}

    def read() -> float:
        match options:
            case {"beta": beta}:
                return beta
        return 0.0

    yield read
    options["beta"] = 0.7


@case
def copied_object() -> Iterator[Any]:
    cfg = Config()
    yield lambda: copy.copy(cfg).beta
    cfg.beta = 0.7


@case
def deeply_copied_object() -> Iterator[Any]:
    cfg = Config(inner={"beta": [0.5]})
    yield lambda: copy.deepcopy(cfg).inner["beta"][0]
    cfg.inner["beta"][0] = 0.7


@case
def operator_attrgetter() -> Iterator[Any]:
    cfg, getter = Config(inner=Config()), operator.attrgetter("inner.beta")
    yield lambda: getter(cfg)
    cfg.inner.beta = 0.7


@case
def class_of_an_object() -> Iterator[Any]:
    cfg = Config()
    yield lambda: 1.0 if isinstance(cfg, Child) else 0.5
    cfg.__class__ = Child


@case
def class_that_a_name_stands_for() -> Iterator[Any]:
    cfg, kind = Config(), Config
    yield lambda: 1.0 if isinstance(cfg, kind) else 0.5
    kind = Child


# Environment and context


@case
def environment_item() -> Iterator[Any]:
    os.environ["GRAPHOPT_TEST_SCALE"] = "0.5"
    yield outside_constants.from_environment
    os.environ["GRAPHOPT_TEST_SCALE"] = "0.7"
    yield
    del os.environ["GRAPHOPT_TEST_SCALE"]


@case
def environment_get() -> Iterator[Any]:
    os.environ.pop("GRAPHOPT_TEST_SCALE", None)
    yield lambda: float(os.environ.get("GRAPHOPT_TEST_SCALE", "0.5"))
    os.environ["GRAPHOPT_TEST_SCALE"] = "0.7"
    yield
    del os.environ["GRAPHOPT_TEST_SCALE"]


@case
def environment_in_a_formatted_text() -> Iterator[Any]:
    os.environ["GRAPHOPT_TEST_SCALE"] = "5"
    yield lambda: float(f"0.{os.getenv('GRAPHOPT_TEST_SCALE')}")
    os.environ["GRAPHOPT_TEST_SCALE"] = "7"
    yield
    del os.environ["GRAPHOPT_TEST_SCALE"]


@case
def formatted_object() -> Iterator[Any]:
    values = [0.5]
    yield lambda: float(f"{values}"[1:-1])
    values[0] = 0.7


@case
def context_variable() -> Iterator[Any]:
    variable = contextvars.ContextVar("beta", default=0.5)
    yield lambda: variable.get()
    variable.set(0.7)


# Functions


@case
def function_replaced() -> Iterator[Any]:
    def factor() -> float:
        return 0.5

    yield lambda: factor()

    factor = lambda: 0.7  # noqa: E731, F811


@case
def function_of_torch_replaced() -> Iterator[Any]:
    original = F.softplus
    yield lambda: F.softplus(torch.ones(())) + 0.1
    F.softplus = lambda x: x
    yield
    F.softplus = original


@case
def function_of_a_module_replaced() -> Iterator[Any]:
    original = outside_constants.scale
    outside_constants.SCALE = 0.5
    yield lambda: outside_constants.scale()
    outside_constants.scale = lambda: 0.7
    yield
    outside_constants.scale = original


@case
def code_of_a_function_replaced() -> Iterator[Any]:
    def factor() -> float:
        return 0.5

    yield lambda: factor()
    factor.__code__ = (lambda: 0.7).__code__


@case
def default_argument() -> Iterator[Any]:
    def factor(beta: float = 0.5) -> float:
        return beta

    yield lambda: factor()
    factor.__defaults__ = (0.7,)


@case
def default_argument_by_keyword() -> Iterator[Any]:
    def factor(*, beta: float = 0.5) -> float:
        return beta

    yield lambda: factor()
    factor.__kwdefaults__["beta"] = 0.7


@case
def contents_of_a_default_argument() -> Iterator[Any]:
    def factor(options: dict[str, float] = {"beta": 0.5}) -> float:  # noqa: B006
        return options["beta"]

    yield lambda: factor()
    factor.__defaults__[0]["beta"] = 0.7


@case
def attribute_of_a_function() -> Iterator[Any]:
    def factor() -> float:
        return factor.beta

    factor.beta = 0.5
    yield factor
    factor.beta = 0.7


@case
def partial_function() -> Iterator[Any]:
    options = {"beta": 0.5}

    def factor(given: dict[str, float]) -> float:
        return given["beta"]

    bound = functools.partial(factor, options)
    yield lambda: bound()
    options["beta"] = 0.7


@case
def keywords_of_a_partial_function() -> Iterator[Any]:
    bound = functools.partial(Config, beta=0.5)
    yield lambda: bound().beta
    bound.keywords["beta"] = 0.7


@case
def bound_method() -> Iterator[Any]:
    cfg = Config()
    methods = [cfg.method]
    yield lambda: methods[0]()
    cfg.beta = 0.7


@case
def callable_object() -> Iterator[Any]:
    class Factor:
        beta = 0.5

        def __call__(self) -> float:
            return self.beta

    factor = Factor()
    yield lambda: factor()
    factor.beta = 0.7


@case
def call_of_a_class_replaced() -> Iterator[Any]:
    class Factor:
        def __call__(self) -> float:
            return 0.5

    factor = Factor()
    yield lambda: factor()
    Factor.__call__ = lambda self: 0.7


@case
def operator_of_a_class_replaced() -> Iterator[Any]:
    class Factor:
        def __rmul__(self, other: float) -> float:
            return 0.5

    factor = Factor()
    yield lambda: 2.0 * factor
    Factor.__rmul__ = lambda self, other: 0.7


@case
def decorated_function() -> Iterator[Any]:
    cfg = Config()

    def scaled(function: Callable[[], float]) -> Callable[[], float]:
        @functools.wraps(function)
        def wrapper() -> float:
            return function() * cfg.beta

        return wrapper

    @scaled
    def factor() -> float:
        return 1.0

    yield factor
    cfg.beta = 0.7


@case
def decorator_with_an_argument() -> Iterator[Any]:
    options = {"beta": 0.5}

    def scaled(given: dict[str, float]) -> Any:
        def decorate(function: Callable[[], float]) -> Callable[[], float]:
            return lambda: function() * given["beta"]

        return decorate

    @scaled(options)
    def factor() -> float:
        return 1.0

    yield factor
    options["beta"] = 0.7


@case
def context_manager() -> Iterator[Any]:
    class Scale:
        beta = 0.5

        def __enter__(self) -> float:
            return self.beta

        def __exit__(self, *exc: object) -> None:
            pass

    scale = Scale()

    def read() -> float:
        with scale as beta:
            return beta

    yield read
    scale.beta = 0.7


@case
def generator_function() -> Iterator[Any]:
    cfg = Config()

    def factors() -> Iterator[float]:
        yield 0.0
        yield cfg.beta

    yield lambda: sum(factors())
    cfg.beta = 0.7


@case
def iterator_class() -> Iterator[Any]:
    class Factors:
        last = 0.5

        def __iter__(self) -> Iterator[float]:
            return iter([0.1, self.last])

    factors = Factors()
    yield lambda: max(factors)
    factors.last = 0.7


@case
def exception_class() -> Iterator[Any]:
    expected: type[Exception] = KeyError

    def read() -> float:
        try:
            raise KeyError
        except expected:
            return 0.5
        except Exception:
            return 0.7

    yield read
    expected = ValueError


# Threads


@case
def read_in_a_thread() -> Iterator[Any]:
    cfg = Config()

    def read() -> float:
        found: queue.Queue[float] = queue.Queue()
        thread = threading.Thread(target=lambda: found.put(cfg.beta))
        thread.start()
        thread.join()
        return found.get()

    yield read
    cfg.beta = 0.7


# Evaluated code


@case
def evaluated_text() -> Iterator[Any]:
    names = {"beta": 0.5}
    yield lambda: eval("beta * 1", names)
    names["beta"] = 0.7


# What is held weakly, and what is remembered


@case
def weak_dictionary_by_key() -> Iterator[Any]:
    key, known = Config(), weakref.WeakKeyDictionary[Any, float]()
    known[key] = 0.5
    yield lambda: known[key]
    known[key] = 0.7


@case
def weak_dictionary_with_a_default() -> Iterator[Any]:
    key, known = Config(), weakref.WeakKeyDictionary[Any, float]()
    yield lambda: known.get(key, 0.5)
    known[key] = 0.7


@case
def weak_dictionary_has() -> Iterator[Any]:
    key, known = Config(), weakref.WeakKeyDictionary[Any, float]()
    yield lambda: 0.7 if key in known else 0.5
    known[key] = 1.0


@case
def weak_dictionary_items() -> Iterator[Any]:
    keys, known = [Config(0.5), Config(0.7)], weakref.WeakKeyDictionary[Any, float]()
    known[keys[0]] = 0.5
    yield lambda: sum(key.beta * value for key, value in known.items()) if keys else 0.0
    known[keys[1]] = 0.5


@case
def weak_dictionary_of_values() -> Iterator[Any]:
    values, known = [Config(0.5), Config(0.7)], weakref.WeakValueDictionary[str, Any]()
    known["config"] = values[0]
    yield lambda: known["config"].beta if values else 0.0
    known["config"] = values[1]


@case
def weak_dictionary_length() -> Iterator[Any]:
    values, known = [Config(0.5), Config(0.7)], weakref.WeakValueDictionary[str, Any]()
    known["config"] = values[0]
    yield lambda: float(len(known)) if values else 0.0
    known["other"] = values[1]


@case
def weak_set() -> Iterator[Any]:
    values = [Config(0.5), Config(0.7)]
    known = weakref.WeakSet(values[:1])
    yield lambda: sum(value.beta for value in known) if values else 0.0
    known.add(values[1])


@case
def weak_set_has() -> Iterator[Any]:
    value, known = Config(), weakref.WeakSet[Any]()
    yield lambda: 0.7 if value in known else 0.5
    known.add(value)


@case
def dispatch_by_class() -> Iterator[Any]:
    @functools.singledispatch
    def scale(value: Any) -> float:
        return 0.5

    @scale.register
    def _of_pair(value: tuple) -> float:  # type: ignore[type-arg]
        return 0.25

    scale(1.0)
    yield lambda: scale(1.0) + scale((1.0,))
    scale.register(float, lambda value: 0.7)


@case
def method_dispatched_by_class() -> Iterator[Any]:
    class Scale:
        @functools.singledispatchmethod
        def of(self, value: Any) -> float:
            return 0.5

    scale = Scale()
    yield lambda: scale.of(1.0)
    Scale.of.register(float, lambda self, value: 0.7)


@case
def cache_cleared() -> Iterator[Any]:
    beta = 0.5

    @functools.lru_cache
    def remembered(power: int) -> float:
        return beta**power

    remembered(2)
    yield lambda: remembered(2)
    beta = 0.7
    remembered.cache_clear()


@case
def cached_method_cleared() -> Iterator[Any]:
    class Remembering:
        beta = 0.5

        @functools.cache  # noqa: B019
        def of(self, power: int) -> float:
            return self.beta**power

    given = Remembering()
    given.of(2)
    yield lambda: given.of(2)
    Remembering.beta = 0.7
    Remembering.of.cache_clear()
