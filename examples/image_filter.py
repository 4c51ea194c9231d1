"""An engine that is no language model: it takes the noise off an image, coarse to fine. Try `--out denoised.pgm`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outboard import AsyncLLM, ConfigError, EngineCore, EngineCoreRequest, EngineInfo, InvalidRequestError, OutputBatch

Image = NDArray[np.floating[Any]]


class ImageFilter(EngineCore):
    """Takes `inputs={"image": H x W array, float32 (0 to 1) or uint8}`; each result is such an array, finer every step.

    A Haar wavelet splits the image into a tiny average and the details of each scale. The first result is the average;
    each step adds the details of the next scale, those alone that stand out from the noise.
    """

    def __init__(self, scales: int = 6, max_num_seqs: int = 4) -> None:
        if not 1 <= scales <= 12 or max_num_seqs < 1:
            raise ConfigError("scales must be 1 to 12, and max_num_seqs at least 1")
        self.scales, self.max_num_seqs = scales, max_num_seqs
        self.waiting: dict[str, NDArray[Any]] = {}
        self.running: dict[str, Refinement] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        image = request.inputs.get("image") if isinstance(request.inputs, dict) else None
        if not (isinstance(image, np.ndarray) and image.ndim == 2 and image.size and image.dtype in ("f4", "u1")):
            raise InvalidRequestError('inputs must be {"image": array}, the array H x W of float32 or uint8, not empty')
        self.waiting[request.request_id] = image

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            self.running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self, outputs: OutputBatch) -> None:
        for request_id in list(self.waiting)[: self.max_num_seqs - len(self.running)]:
            self.running[request_id] = Refinement(self.waiting.pop(request_id), self.scales)
            outputs.scheduled(request_id)
        for request_id, refinement in list(self.running.items()):
            result = refinement.advance()  # never the same array again: the last one may still be on its way
            outputs.add(request_id, finish_reason=None if refinement.details else "stop", result=result)
            if not refinement.details:
                del self.running[request_id]

    def info(self) -> EngineInfo:
        return EngineInfo(max_num_seqs=self.max_num_seqs, model="image-filter")


class Refinement:
    """One image on its way: what is known so far, and the details to add, the coarsest last."""

    def __init__(self, image: NDArray[Any], scales: int) -> None:
        self.shape, self.dtype = image.shape, image.dtype
        average: Image = image / np.float32(255 if image.dtype == np.uint8 else 1)
        average = np.pad(average, [(0, -size % (1 << scales)) for size in image.shape], mode="symmetric")
        self.details: list[tuple[Image, Image, Image]] = []
        for _ in range(scales):
            a, b, c, d = average[::2, ::2], average[::2, 1::2], average[1::2, ::2], average[1::2, 1::2]
            self.details.append(((a - b + c - d) / 4, (a + b - c - d) / 4, (a - b - c + d) / 4))
            average = (a + b + c + d) / 4
        self.noise = 2 * float(np.median(np.abs(self.details[0][2]))) / 0.6745  # its standard deviation, by the finest
        self.average, self.started = average, False

    def advance(self) -> NDArray[Any]:
        """Adds the details of the next scale; returns a new array: the image as it is now known, in full size."""
        if self.started:
            limit = 4 * self.noise / 2 ** len(self.details)
            h, v, d = (np.where(np.abs(detail) > limit, detail, 0) for detail in self.details.pop())
            finer = np.empty((2 * h.shape[0], 2 * h.shape[1]), np.float32)
            finer[::2, ::2], finer[::2, 1::2] = self.average + h + v + d, self.average - h + v - d
            finer[1::2, ::2], finer[1::2, 1::2] = self.average + h - v - d, self.average - h - v + d
            self.average = finer
        self.started, size = True, 1 << len(self.details)
        whole = self.average.repeat(size, 0).repeat(size, 1)[: self.shape[0], : self.shape[1]]
        return (whole * 255).clip(0, 255).round().astype(np.uint8) if self.dtype == np.uint8 else whole


def picture(height: int = 400, width: int = 500, seed: int = 0) -> tuple[Image, Image]:
    """A disc and a bar on a slope, clean and with noise."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    clean = 0.2 + 0.4 * x / width + 0.3 * ((y - height / 2) ** 2 + (x - width / 3) ** 2 < (height / 4) ** 2)
    clean[height // 5 + 1 : height // 4, width // 8 :] = 0.9
    noise = np.random.default_rng(seed).normal(0, 0.1, clean.shape)
    return clean.astype(np.float32), (clean + noise).astype(np.float32)


def psnr(clean: NDArray[Any], image: NDArray[Any]) -> float:
    """Peak signal-to-noise ratio, dB; the peak is 1."""
    return float(-10 * np.log10(np.mean((clean - image) ** 2)))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the last result here, as a PGM file")
    out = parser.parse_args().out
    clean, image = picture()
    print(f"noisy: {psnr(clean, image):.2f} dB")
    async with AsyncLLM(ImageFilter) as llm:
        async for output in llm.generate(inputs={"image": image}):
            image = output.outputs[0].result
            print(f"refined: {psnr(clean, image):.2f} dB", flush=True)
    if out is not None:
        out.write_bytes(b"P5 %d %d 255\n" % image.shape[::-1] + (image * 255).clip(0, 255).astype(np.uint8).tobytes())


if __name__ == "__main__":
    asyncio.run(main())
