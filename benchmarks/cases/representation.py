"""Cases of self-supervised learning and embeddings."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from .case import Case, case, repeated, trains, trains_all


def encoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip


def views() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3, 8, 8), torch.rand(6, 3, 8, 8)


contrastive_loss = nn.CrossEntropyLoss()


def info_nce(features: Tensor) -> tuple[Tensor, Tensor]:
    n = features.shape[0] // 2
    labels = torch.cat([torch.arange(n) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / 0.07, torch.zeros(logits.shape[0], dtype=torch.long)


def cosine(optimizer: Any) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=10)


@trains(encoder, Adam, views, cosine, lr=3e-4, weight_decay=1e-4)
def simclr(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
    """SimCLR with the well-known repository's loss: a boolean mask removes the diagonal."""
    logits, labels = info_nce(model(torch.cat([a, b])))
    loss = contrastive_loss(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class MoCo(nn.Module):
    """MoCo as published: a queue and its pointer as buffers, and a momentum encoder."""

    def __init__(self, K: int = 24, m: float = 0.999, T: float = 0.07) -> None:
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            idx_shuffle = torch.randperm(im_k.shape[0])
            idx_unshuffle = torch.argsort(idx_shuffle)
            k = F.normalize(self.encoder_k(im_k[idx_shuffle]), dim=1)[idx_unshuffle]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


def momentum(parameters: Any) -> SGD:
    trained = [p for p in parameters if p.requires_grad]
    return SGD(trained, 0.03, momentum=0.9, weight_decay=1e-4)


@trains(MoCo, momentum, views)
def moco(model: Any, optimizer: Any, a: Tensor, b: Tensor) -> Tensor:
    output, target = model(a, b)
    loss = F.cross_entropy(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def with_predictor() -> tuple[Any, ...]:
    online, predictor = encoder(), nn.Linear(8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], lr=1e-3)
    return online, predictor, target, optimizer


def loss_of(p: Tensor, z: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


@trains_all(with_predictor, views)
def byol(online: Any, predictor: Any, target: Any, optimizer: Any, a: Any, b: Any) -> Tensor:
    with torch.no_grad():
        z1, z2 = target(a), target(b)
    loss = loss_of(predictor(online(a)), z2) + loss_of(predictor(online(b)), z1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for p, t in zip(online.parameters(), target.parameters(), strict=True):
        t.data.mul_(0.99).add_(p.data, alpha=0.01)
    return loss


class DINOLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        outs = (student / 0.1).chunk(2)
        soft = F.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for i, q in enumerate(soft):
            for v in range(len(outs)):
                if v == i:
                    continue
                total += torch.sum(-q * F.log_softmax(outs[v], dim=-1), dim=-1).mean()
                terms += 1
        self.update_center(teacher)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        batch = torch.sum(teacher, dim=0, keepdim=True) / len(teacher)
        self.center = self.center * 0.9 + batch * (1 - 0.9)


def with_teacher() -> tuple[Any, ...]:
    student = encoder()
    teacher = copy.deepcopy(student).requires_grad_(False)
    return student, teacher, DINOLoss(), AdamW(student.parameters(), lr=1e-3)


@trains_all(with_teacher, views)
def dino(student: Any, teacher: Any, criterion: Any, optimizer: Any, a: Any, b: Any) -> Tensor:
    """DINO, whose loss module keeps the centre of the teacher's outputs."""
    outputs = student(torch.cat([a, b]))
    loss = criterion(outputs, teacher(torch.cat([a, b])))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
            t.data.mul_(0.996).add_((1 - 0.996) * s.detach().data)
    return loss


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = encoder(), nn.EmbeddingBag(20, 8)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.659)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        a, b = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        return self.logit_scale.exp() * a @ b.t()


def captioned() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3, 8, 8), torch.randint(0, 20, (6, 5))


@trains(CLIP, AdamW, captioned, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
def clip(model: Any, optimizer: Any, images: Tensor, texts: Tensor) -> Tensor:
    logits = model(images, texts)
    labels = torch.arange(len(images))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    return loss


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(torch.spmm(adjacency, self.w1(x)))
        return torch.spmm(adjacency, self.w2(F.dropout(x, 0.5, training=self.training)))


def graph() -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    adjacency = (torch.rand(10, 10) > 0.7).float() + torch.eye(10)
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    train = torch.zeros(10, dtype=torch.bool)
    train[:5] = True
    return torch.randn(10, 6), adjacency, torch.randint(0, 3, (10,)), train


def on_graph(sparse: bool, by_index: bool) -> tuple[Any, ...]:
    model = GCN()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, adjacency, labels, train = graph()
    adjacency = adjacency.to_sparse() if sparse else adjacency
    return model, optimizer, x, adjacency, labels, train.nonzero().squeeze(1) if by_index else train


def classify_nodes(model: Any, optimizer: Any, x: Any, adjacency: Any, y: Any, mask: Any) -> Tensor:
    model.train()
    optimizer.zero_grad()
    out = F.log_softmax(model(x, adjacency), dim=1)
    loss = F.nll_loss(out[mask], y[mask])
    loss.backward()
    optimizer.step()
    return loss


for name, sparse, by_index in (
    ("gcn", False, True),
    ("gcn_with_mask", False, False),
    ("gcn_sparse", True, True),
):
    trains_all(partial(on_graph, sparse, by_index), lambda: (), name=name)(classify_nodes)


@case
def word2vec() -> Case:
    """word2vec with negative sampling from a table of weights."""
    model = nn.ModuleDict({"u": nn.Embedding(20, 8), "v": nn.Embedding(20, 8)})
    optimizer = Adagrad(model.parameters(), lr=0.1)
    frequencies = torch.rand(20)

    def step(model: Any, optimizer: Any, centre: Tensor, context: Tensor) -> Tensor:
        negative = torch.multinomial(frequencies, centre.shape[0] * 3, replacement=True)
        u, v = model["u"](centre), model["v"](context)
        n = model["v"](negative.view(centre.shape[0], 3))
        positive = F.logsigmoid((u * v).sum(1))
        others = F.logsigmoid(-torch.bmm(n, u.unsqueeze(2)).squeeze(2)).sum(1)
        loss = -(positive + others).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def pairs() -> tuple[Tensor, Tensor]:
        return torch.randint(0, 20, (8,)), torch.randint(0, 20, (8,))

    return Case(step, repeated(model, optimizer, draw=pairs), [model, optimizer])


triplet_loss = nn.TripletMarginLoss(margin=1.0)


@trains(encoder, SGD, views, lr=0.05, momentum=0.9, nesterov=True)
def triplets(model: Any, optimizer: Any, anchor: Tensor, positive: Tensor) -> Tensor:
    loss = triplet_loss(model(anchor), model(positive), model(anchor.flip(0)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
