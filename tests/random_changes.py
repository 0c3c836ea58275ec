"""Random steps that read what Python has outside: variables, classes, functions, containers; and
what a program changes of that between their calls."""

from __future__ import annotations

import random

HEAD = """
import contextvars, enum, functools, math, os, threading, types
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import numpy
import torch
from torch import nn
from torch.nn import functional as F

RATE = 0.5
TABLE = {"scale": 1.0, "names": ["a", "bb"], "act": torch.relu, "deep": {"k": [1.0, 2.0]}}
scales = OrderedDict(a=0.5, b=1.5)
counts = Counter(a=1, b=2)
chain = ChainMap({"a": 1.0}, {"a": 2.0, "b": 3.0})
queue = deque([1.0, 2.0], maxlen=3)
some = {"a", "b"}
made = defaultdict(lambda: 2.0)
pair = namedtuple("pair", "x y")(1.0, 2.0)
numbers = numpy.array([1.0, 2.0], numpy.float32)
var = contextvars.ContextVar("var", default=1.0)
local = threading.local()
local.x = 1.0
base = 2.0
os.environ["SCALE_OF_A_TEST"] = "1.5"


def scaled(x, by=1.5, *, shift=0.25):
    return x * by + shift


def other(x, by=1.5, *, shift=0.25):
    return x * by - shift


def closed():
    inner = 1.5

    def get():
        return inner

    def put(value):
        nonlocal inner
        inner = value

    return get, put


get, put = closed()
part = functools.partial(scaled, by=0.5)


@functools.lru_cache
def cached(x):
    return x * base


@functools.singledispatch
def kind_of(x):
    return 1.0


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args) * RATE

    return call


@decorated
def doubled(x):
    return x * 2


class Mode(enum.Enum):
    A = 1
    B = 2


class Config:
    rate, power = 0.5, 2

    def __init__(self):
        self.n, self.name, self.index, self.mode, self.p = 4, "a", 0, Mode.A, 0.0
        self.vector, self.items, self.dtype, self.flag = [1.0, 2.0, 3.0], {"k": 1.5}, None, True

    def __getitem__(self, key):
        return self.items[key]

    def __call__(self):
        return self.rate

    def __len__(self):
        return len(self.vector)

    def __bool__(self):
        return self.flag

    def __eq__(self, other):
        return self.n == other

    __hash__ = None

    @property
    def half(self):
        return self.n / 2


class Other(Config):
    rate = 0.75


class Slots:
    __slots__ = ("a", "b")


@dataclass
class Data:
    x: float = 1.0
    y: list = field(default_factory=lambda: [1.0])


class Base:
    factor = 1.0

    def act(self, x):
        return torch.tanh(x) * self.factor

    @staticmethod
    def mix(x):
        return x + 0.5

    @classmethod
    def of(cls, x):
        return x * cls.factor


class Block(Base, nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self._gain = nn.Linear(3, 3), 1.0

    @property
    def gain(self):
        return self._gain

    def forward(self, x):
        return self.inner(self.act(x)) * self.gain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.block, self.table = Block(), nn.ModuleDict({"a": nn.Identity(), "b": nn.Tanh()})
        self.order, self.scale = ["a", "b"], 1.0

    def forward(self, x):
        return self.block(x) * self.scale


c, slots, data, space = Config(), Slots(), Data(), types.SimpleNamespace(a=1.0, b=[1.0])
slots.a, slots.b = 1.0, [2.0]
act, model, rows = torch.relu, Model(), [torch.ones(3), torch.zeros(3)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SIMPLE_USES = """
h = h * RATE
h = scaled(h)
h = h * TABLE['scale']
h = TABLE['act'](h)
h = part(h)
h = h * c.rate
h = model.block.act(h)
h = h * model.block.gain
h = h * Block.factor
h = Block.mix(h)
h = model.block.of(h)
h = h * slots.a
h = h * slots.b[0]
h = h * data.x
h = h + data.y[-1]
h = h if c.mode is Mode.A else -h
h = h * cached(2)
h = h * var.get()
h = h * local.x
h = h * float(os.environ.get('SCALE_OF_A_TEST', 1))
h = h * len(TABLE['names'])
h = h * (2 if 'k' in TABLE else 1)
h = h * get()
for n in TABLE['names']: h = h + len(n)
h = h * sum(scales.values())
for k, v in scales.items(): h = h * v + len(k)
h = h * math.sqrt(c.n)
h = h + torch.tensor(c.vector)
h = h * float(numbers[0])
h = h + torch.from_numpy(numbers).sum()
h = h * kind_of(c)
h = doubled(h)
h = act(h)
h = h * (2 if isinstance(c, Other) else 1)
h = h * getattr(c, 'extra', 1.5)
h = h * c['k']
h = h * (1 if hasattr(c, 'extra') else 2)
h = h * c()
h = h * len(c)
h = h * c.half
if c: h = -h
h = h * (1 if c == 4 else 2)
h = model.layers[c.index](h)
h = h * pair.x
for layer in model.layers: h = layer(h)
h = F.dropout(h, c.p, model.training)
h = model.table[c.name](h)
for k in model.order: h = model.table[k](h)
h = h * model.scale
h = h * counts['a']
h = h * counts.most_common(1)[0][1]
h = h * chain['a']
h = h + queue[0]
h = h * sum(queue)
h = h * len(some)
h = h * ('a' in some)
h = h * made['x']
h = h + rows[0]
h = h + sum(rows)
h = h * space.a
h = h * space.b[0]
h = h * max(TABLE['deep']['k'])
h = h.to(c.dtype or h.dtype).float()
h = h * c.power ** 2
h = h * len(vars(c))
h = h * type(c).rate
h = h * sorted(scales.values())[0]
h = h * [*scales][0].count('a')
h = h * dict(TABLE['deep'], z=1)['z']
h = h * min(data.y, default=2.0)
h = h * any(data.y)
h = h * next(iter(scales.values()))
h = h * space.__dict__['a']
h = h * c.__dict__.get('n', 1)
h = h * int(c.name == 'a')
h = h * len(f'{c.name}{c.n}')
h = h * str(c.n).count('4')
h = h * {**scales, 'z': 2.0}['z']
h = h + [r for r in rows if r.sum() > -1][0]
n, *_ = data.y; h = h * n
h = h * scales.get('b', 3.0)
h = h * scales.setdefault('a', 1.0)
h = h * TABLE.get('new', 1.5)
h = h * (lambda: RATE)()
h = functools.reduce(lambda a, b: a * b, c.vector, h)
h = h * len(c.items)
h = model.block(h)
h = model(h)
h = h * all(p.requires_grad for p in model.parameters())
""".strip().splitlines()
USES = (
    *SIMPLE_USES,
    "match c.name:\n            case 'a': h = h * 2\n            case _: h = h * 3",
    "with torch.no_grad(): h = h * RATE\n        h = h.requires_grad_()",
    "try: h = h * c.extra\n        except AttributeError: h = h * 0.75",
    "try: h = h * scales['z']\n        except KeyError: h = h * 0.25",
)
CHANGES = """
RATE = 0.25
RATE = 1
scaled.__defaults__ = (2.0,)
scaled.__kwdefaults__ = {'shift': 1.0}
scaled.__code__ = other.__code__
scaled = other
TABLE['scale'] = 2.0
TABLE['names'].append('c')
TABLE['act'] = torch.tanh
TABLE['k'] = 1
TABLE.pop('k', None)
TABLE = dict(TABLE, scale=3.0)
c.rate = 2.0
Config.rate = 3.0
c.__class__ = Other
Other.rate = 4.0
Base.factor = 2.0
Base.act = lambda self, x: x * 3
model.block.act = lambda x: x * 4
Block.act = Base.mix
Block.gain = property(lambda self: 5.0)
model.block._gain = 2.0
Base.mix = staticmethod(torch.relu)
Block.factor = 3.0
slots.a = 3.0
slots.b.insert(0, 4.0)
slots.b = [5.0]
data.x = 3.0
data.y.append(2.0)
data = Data(2.0, [3.0])
c.mode = Mode.B
part = functools.partial(other, by=3.0)
part.keywords['by'] = 4.0
cached.cache_clear(); base = 5.0
base = 7.0
var.set(3.0)
local.x = 2.0
os.environ['SCALE_OF_A_TEST'] = '3'
os.environ.pop('SCALE_OF_A_TEST', None)
scales['z'] = 1.25
scales['a'] = 0.75
scales.move_to_end('a')
put(2.0)
get, put = closed()
c.n = 9
c.n = 4
c.vector[0] = 5.0
c.vector = [4.0, 5.0, 6.0]
numbers[0] = 3.0
numbers *= 2
numbers = numbers + 1
kind_of.register(Config, lambda x: 3.0)
act = torch.tanh
act = nn.Tanh()
c.extra = 3.0
vars(c).pop('extra', None)
c.items['k'] = 9.0
c.items = {'k': 2.5, 'l': 1}
c.flag = False
Config.__call__ = lambda self: 7.0
Config.__len__ = lambda self: 8
Config.__bool__ = lambda self: False
Config.__eq__ = lambda self, other: False
Config.half = property(lambda self: 6.0)
Config.half = 2.0
c.index = 1
c.name = 'b'
c.p = 0.5
c = Config()
c = Other()
model.layers.append(nn.Tanh())
model.layers[0] = nn.Identity()
model.order.reverse()
model.order = ['b']
model.scale = 2.0
model.table['a'] = nn.Tanh()
model.eval()
model.train()
model.block.forward = lambda x: x * 2
Block.forward = lambda self, x: self.inner(x) * 3
counts.update('aab')
del counts['a']
chain.maps[0]['a'] = 4.0
chain = chain.new_child({'a': 5.0})
chain.maps[0].pop('a', None)
queue.append(4.0)
queue.rotate(1)
some.add('c')
some.discard('a')
made['x'] = 5.0
made.default_factory = lambda: 3.0
made.clear()
pair = pair._replace(x=3.0)
rows[0] = torch.full((3,), 2.0)
rows[0].add_(1)
rows.append(torch.ones(3))
rows.reverse()
space.a = 2.0
space.b = [3.0]
space = types.SimpleNamespace(a=4.0, b=[5.0])
TABLE['deep']['k'].append(4.0)
TABLE['deep'] = {'k': [7.0]}
c.dtype = torch.bfloat16
Config.power = 3
c.power = 1
TABLE['new'] = 2.0
c.name = c.name * 2
doubled = scaled
doubled.__wrapped__.__code__ = (lambda x: x * 3).__code__
Mode.A.z = 1
del Other.rate
model.layers[0].requires_grad_(False)
scales.clear()
scales = OrderedDict(b=2.0, a=1.0)
c.vector.sort(reverse=True)
Config.__getitem__ = lambda self, key: 2.0
Config.extra = 1.25
vars(Config).get('extra') and delattr(Config, 'extra')
Base.of = classmethod(lambda cls, x: x + 1)
Block.__bases__ = (nn.Module,) if False else Block.__bases__
pass
""".strip().splitlines()
NAMES = [
    "RATE",
    "TABLE",
    "scales",
    "counts",
    "chain",
    "queue",
    "some",
    "made",
    "pair",
    "numbers",
    "base",
    "scaled",
    "get",
    "put",
    "part",
    "c",
    "slots",
    "data",
    "space",
    "act",
    "rows",
    "doubled",
]


def source(seed: int) -> str:
    """A module with a step, and a function of what the program changes behind a call."""
    draw = random.Random(seed)
    uses = [draw.choice(USES) for _ in range(draw.randint(3, 7))]
    changes = [[draw.choice(CHANGES) for _ in range(draw.randint(0, 3))] for _ in range(6)]
    step = "".join(f"        {each}\n" for each in uses)
    between = "".join(
        f"    if i == {i}:\n        pass\n" + "".join(f"        {each}\n" for each in lines)
        for i, lines in enumerate(changes)
    )
    return (
        f"{HEAD}\n\ndef step(x):\n    if True:\n"
        f"        h = x * model.layers[0].weight.sum()\n{step}"
        "        loss = (h.clamp(-9, 9) * model.block.inner.weight.sum()).tanh().mean()\n"
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        "        return loss\n\n\n"
        f"def between(i):\n    global {', '.join(NAMES)}\n{between}"
    )
