"""Cases of generative models: adversarial, variational, diffusion, radiance fields."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from .case import Case, case, cured, mlp, refused, repeated, trains, trains_all


def weights_init(module: nn.Module) -> None:
    name = module.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(module.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(module.weight.data, 1.0, 0.02)
        nn.init.constant_(module.bias.data, 0)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).apply(weights_init)


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    ).apply(weights_init)


def images() -> tuple[Tensor]:
    return (torch.rand(4, 3, 8, 8),)


def generator_and_discriminator() -> tuple[Any, ...]:
    netG, netD = generator(), discriminator()
    optimizerD = Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    return netG, netD, optimizerG, optimizerD


criterion = nn.BCELoss()


@trains_all(generator_and_discriminator, images)
def dcgan(netG: Any, netD: Any, optimizerG: Any, optimizerD: Any, real: Tensor) -> Any:
    """DCGAN of PyTorch's tutorial: labels filled in, three backwards, two optimizers, numbers
    returned."""
    netD.zero_grad()
    b_size = real.size(0)
    label = torch.full((b_size,), 1.0, dtype=torch.float)
    output = netD(real).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.mean().item()
    noise = torch.randn(b_size, 8, 1, 1)
    fake = netG(noise)
    label.fill_(0.0)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    D_G_z1 = output.mean().item()
    errD = errD_real + errD_fake
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    D_G_z2 = output.mean().item()
    optimizerG.step()
    return errD.item(), errG.item(), D_x, D_G_z1, D_G_z2


def generator_and_critic() -> tuple[Any, ...]:
    netG, critic = generator(), nn.Sequential(nn.Flatten(), *mlp(192, 16, 1))
    optimizerG = Adam(netG.parameters(), lr=1e-4, betas=(0.0, 0.9))
    optimizerD = Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    return netG, critic, optimizerG, optimizerD


def penalty(critic: Any, real: Tensor, fake: Tensor) -> Tensor:
    alpha = torch.rand(real.size(0), 1, 1, 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    gradients = autograd.grad(
        outputs=scores,
        inputs=mixed,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.view(real.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()


@trains_all(generator_and_critic, images, numbered=True)
def wgan_gp(netG: Any, critic: Any, optG: Any, optD: Any, real: Tensor, index: int) -> Any:
    """WGAN-GP: the critic's step with its gradient penalty; every second call trains the
    generator."""
    optD.zero_grad()
    z = torch.randn(real.shape[0], 8, 1, 1)
    fake = netG(z).detach()
    d_loss = -critic(real).mean() + critic(fake).mean() + 10 * penalty(critic, real, fake)
    d_loss.backward()
    optD.step()
    if index % 2 == 0:
        optG.zero_grad()
        g_loss = -critic(netG(z)).mean()
        g_loss.backward()
        optG.step()
    return d_loss


class VectorQuantizer(nn.Module):
    """A vector quantizer whose codebook follows exponential moving averages."""

    def __init__(self, codes: int = 8, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.ema_w = nn.Parameter(torch.randn(codes, width), requires_grad=False)
        self.codes, self.decay = codes, 0.99

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, inputs.shape[-1])
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.embedding.weight.t())
        )
        indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self.codes)
        encodings.scatter_(1, indices, 1)
        quantized = torch.matmul(encodings, self.embedding.weight).view(inputs.shape)
        if self.training:
            self.cluster_size = self.cluster_size * self.decay + (1 - self.decay) * encodings.sum(0)
            n = torch.sum(self.cluster_size.data)
            self.cluster_size = (self.cluster_size + 1e-5) / (n + self.codes * 1e-5) * n
            dw = torch.matmul(encodings.t(), flat)
            self.update(self.ema_w * self.decay + (1 - self.decay) * dw)
        loss = 0.25 * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        probabilities = encodings.mean(0)
        perplexity = torch.exp(-torch.sum(probabilities * torch.log(probabilities + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity

    def update(self, ema_w: Tensor) -> None:
        self.ema_w = nn.Parameter(ema_w, requires_grad=False)
        self.embedding.weight = nn.Parameter(self.ema_w / self.cluster_size.unsqueeze(1))


class UpdatedQuantizer(VectorQuantizer):
    """A vector quantizer whose codebook is updated in place."""

    @torch.no_grad()
    def update(self, ema_w: Tensor) -> None:
        self.ema_w.copy_(ema_w)
        self.embedding.weight.copy_(self.ema_w / self.cluster_size.unsqueeze(1))


class CodebookLoss(nn.Module):
    """A vector quantizer trained by its codebook loss."""

    def __init__(self, codes: int = 8, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        self.embedding.weight.data.uniform_(-1 / codes, 1 / codes)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        indices = torch.cdist(flat, self.embedding.weight).argmin(1)
        quantized = self.embedding(indices).view(z.shape)
        loss = ((quantized.detach() - z) ** 2).mean() * 0.25 + (
            (quantized - z.detach()) ** 2
        ).mean()
        quantized = z + (quantized - z).detach()
        return loss, quantized.permute(0, 3, 1, 2).contiguous()


def coder(quantizer: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "encoder": nn.Conv2d(3, 4, 4, 2, 1),
            "quantizer": quantizer,
            "decoder": nn.ConvTranspose2d(4, 3, 4, 2, 1),
        }
    )


def train_coder(model: Any, optimizer: Any, data: Tensor) -> Any:
    optimizer.zero_grad()
    vq_loss, quantized, *_ = model["quantizer"](model["encoder"](data))
    error = F.mse_loss(model["decoder"](quantized), data) / 0.06
    loss = error + vq_loss
    loss.backward()
    optimizer.step()
    return error.item(), loss


trains(lambda: coder(CodebookLoss()), Adam, images, name="vq_vae", lr=1e-3)(train_coder)


@refused("replaces the parameter")
def vq_vae_replacing_parameters() -> Case:
    """A VQ-VAE as in a well-known notebook: each forward replaces the codebook parameter."""
    return _averaging(VectorQuantizer())


@cured
def vq_vae_replacing_parameters_cured() -> Case:
    return _averaging(UpdatedQuantizer())


def _averaging(quantizer: VectorQuantizer) -> Case:
    model = coder(quantizer)
    optimizer = Adam([*model["encoder"].parameters(), *model["decoder"].parameters()])
    return Case(train_coder, repeated(model, optimizer, draw=images), [model, optimizer])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(192, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 192)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 192)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@trains(VAE, Adam, images, lr=1e-3)
def vae(model: Any, optimizer: Any, data: Tensor) -> Tensor:
    optimizer.zero_grad()
    recon, mu, logvar = model(data)
    bce = F.binary_cross_entropy(recon, data.view(-1, 192), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss = bce + kld
    loss.backward()
    optimizer.step()
    return loss


@trains(VAE, Adam, images, lr=1e-3)
def vae_with_distributions(model: Any, optimizer: Any, data: Tensor) -> Tensor:
    """A VAE with torch.distributions and its default argument validation."""
    optimizer.zero_grad()
    h = F.relu(model.fc1(data.view(-1, 192)))
    posterior = torch.distributions.Normal(model.fc21(h), model.fc22(h).mul(0.5).exp())
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    z = posterior.rsample()
    logits = model.fc4(F.relu(model.fc3(z)))
    seen = torch.distributions.Bernoulli(logits=logits)
    likelihood = seen.log_prob((data.view(-1, 192) > 0.5).float()).sum(-1)
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    loss = (kl - likelihood).mean()
    loss.backward()
    optimizer.step()
    return loss


class Denoiser(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.leave = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = 4
        freqs = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
        angles = t[:, None].float() * freqs[None, :]
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = self.enter(x) + emb[:, :, None, None]
        return self.leave(F.silu(self.norm(h)))


class EMA:
    """An averaged copy of a model, as many repositories write it: a plain object."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def update(self, averaged: nn.Module, current: nn.Module) -> None:
        for new, old in zip(current.parameters(), averaged.parameters(), strict=True):
            old.data = old.data * self.beta + (1 - self.beta) * new.data


class InPlaceEMA(EMA):
    @torch.no_grad()
    def update(self, averaged: nn.Module, current: nn.Module) -> None:
        for new, old in zip(current.parameters(), averaged.parameters(), strict=True):
            old.mul_(self.beta).add_(new, alpha=1 - self.beta)


class Diffusion:
    """A diffusion noise schedule as tensors on a plain object, as in public repositories."""

    def __init__(self, steps: int = 50) -> None:
        self.noise_steps = steps
        self.beta = torch.linspace(1e-4, 0.02, steps)
        self.alpha = 1.0 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.sqrt(self.alpha_hat[t])[:, None, None, None]
        other = torch.sqrt(1 - self.alpha_hat[t])[:, None, None, None]
        noise = torch.randn_like(x)
        return root * x + other * noise, noise

    def sample_timesteps(self, n: int) -> Tensor:
        return torch.randint(low=1, high=self.noise_steps, size=(n,))


def _diffusion(average: EMA) -> Case:
    model = Denoiser()
    averaged = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=3e-4)
    diffusion, mse = Diffusion(), nn.MSELoss()

    def step(model: Any, averaged: Any, optimizer: Any, data: Tensor) -> Tensor:
        t = diffusion.sample_timesteps(data.shape[0])
        x_t, noise = diffusion.noise_images(data, t)
        loss = mse(noise, model(x_t, t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(averaged, model)
        return loss

    fixed = (model, averaged, optimizer)
    return Case(step, repeated(*fixed, draw=images), [*fixed, vars(diffusion)])


@case
def diffusion_with_ema() -> Case:
    return _diffusion(InPlaceEMA(0.995))


@case
def diffusion_with_ema_by_data() -> Case:
    return _diffusion(EMA(0.995))


@case
def diffusion_closed_over() -> Case:
    """Diffusion training with an averaged model that the step knows only by its closure."""
    model = Denoiser()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    alphas = torch.linspace(0.99, 0.5, 50)
    optimizer = AdamW(model.parameters(), lr=3e-4)

    def step(model: Any, optimizer: Any, data: Tensor) -> Tensor:
        t = torch.randint(0, 50, (data.shape[0],))
        noise = torch.randn_like(data)
        a = alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * data + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                shadow[name].lerp_(parameter, 0.01)
        return loss

    return Case(step, repeated(model, optimizer, draw=images), [model, optimizer, shadow])


class NeRF(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(15, width), nn.Linear(width + 15, width)])
        self.out = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        encoded = [points]
        for frequency in 2.0 ** torch.linspace(0, 1, 2):
            encoded += [torch.sin(points * frequency), torch.cos(points * frequency)]
        x = torch.cat(encoded, -1)
        h = F.relu(self.layers[0](x))
        return self.out(F.relu(self.layers[1](torch.cat([x, h], -1))))


def render(raw: Tensor, z: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    dists = z[..., 1:] - z[..., :-1]
    dists = torch.cat([dists, torch.Tensor([1e10]).expand(dists[..., :1].shape)], -1)
    dists = dists * torch.norm(directions[..., None, :], dim=-1)
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    through = torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1)
    weights = alpha * torch.cumprod(through, -1)[:, :-1]
    return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights


def rays() -> tuple[Tensor, ...]:
    return torch.randn(8, 3), torch.randn(8, 3), torch.rand(8, 3)


def slowly_decaying(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda number: 0.1 ** (number / 250))


@trains(NeRF, Adam, rays, slowly_decaying, lr=5e-4, betas=(0.9, 0.999))
def nerf(model: Any, optimizer: Any, origins: Tensor, directions: Tensor, rgb: Tensor) -> Any:
    z = torch.linspace(2.0, 6.0, 6).expand(origins.shape[0], 6)
    mids = 0.5 * (z[..., 1:] + z[..., :-1])
    upper, lower = torch.cat([mids, z[..., -1:]], -1), torch.cat([z[..., :1], mids], -1)
    z = lower + (upper - lower) * torch.rand(z.shape)
    points = origins[..., None, :] + directions[..., None, :] * z[..., :, None]
    colour, _ = render(model(points), z, directions)
    loss = torch.mean((colour - rgb) ** 2)
    psnr = -10.0 * torch.log(loss) / torch.log(torch.Tensor([10.0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, psnr


class RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        self.mask = nn.Parameter(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), requires_grad=False)
        self.t = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.s = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))

    def log_prob(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for i in reversed(range(2)):
            kept = self.mask[i] * x
            s, t = self.s[i](kept) * (1 - self.mask[i]), self.t[i](kept) * (1 - self.mask[i])
            x = (1 - self.mask[i]) * (x - t) * torch.exp(-s) + kept
            total -= s.sum(dim=1)
        return self.prior.log_prob(x) + total


@trains(RealNVP, Adam, lambda: (torch.randn(8, 2),), lr=1e-3)
def normalizing_flow(flow: Any, optimizer: Any, x: Tensor) -> Tensor:
    """RealNVP with masks in a list of buffers, and a standard normal as a plain attribute."""
    optimizer.zero_grad()
    loss = -flow.log_prob(x).mean()
    loss.backward()
    optimizer.step()
    return loss
