"""Small datasets in the formats that the real ones have on disk."""

import gzip
import pickle
import wave
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "bed", "cat")
GENES, CELLS_A_TYPE = 3000, 45
TYPES = ("B cells", "Monocytes", "T cells")


def small_root(root: Path) -> Path:
    """Write all of them."""
    idx(root / "MNIST" / "raw", packed=False)
    idx(root / "FashionMNIST" / "raw", packed=True)
    cifar10(root / "cifar-10-batches-py")
    tiny_imagenet(root / "tiny-imagenet-200")
    image_folder(root / "images")
    speech_commands(root / "SpeechCommands" / "speech_commands_v0.02")
    pbmc3k(root / "pbmc3k" / "filtered_gene_bc_matrices" / "hg19")
    return root


def idx(folder: Path, packed: bool) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, samples in {"train": 200, "t10k": 50}.items():
        images = generator.integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        labels = np.arange(samples, dtype=np.uint8) % 10
        for kind, array in {"images-idx3": images, "labels-idx1": labels}.items():
            header = np.array([0x0800 + array.ndim, *array.shape], ">u4").tobytes()
            content = header + array.tobytes()
            path = folder / f"{name}-{kind}-ubyte"
            if packed:
                path = path.with_name(f"{path.name}.gz")
                content = gzip.compress(content)
            path.write_bytes(content)


def cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(1)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {
            "batch_label": name,
            "labels": [i % 10 for i in range(40)],
            "data": generator.integers(0, 256, (40, 3072), dtype=np.uint8),
            "filenames": [f"{name}_{i}.png" for i in range(40)],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def tiny_imagenet(folder: Path) -> None:
    generator = np.random.default_rng(2)
    wnids = ("n02124075", "n01443537", "n04067472")  # not sorted, as in the original

    def write(path: Path, grey: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        blocks = generator.integers(0, 256, (8, 8) if grey else (8, 8, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((64, 64)).save(path, "JPEG")

    lines: list[str] = []
    for wnid in wnids:
        for i in range(30):
            write(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", grey=i % 10 == 0)
        for i in range(4):
            name = f"val_{len(lines)}.JPEG"
            write(folder / "val" / "images" / name, grey=i == 0)
            lines.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01443537\tgoldfish\nn02124075\tEgyptian cat\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def image_folder(folder: Path) -> None:
    generator = np.random.default_rng(3)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(40):
            pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def write_wave(path: Path, samples: np.ndarray, rate: int = 16_000) -> None:
    """Write 16-bit samples (samples,) or (samples, channels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def speech_commands(folder: Path) -> None:
    generator = np.random.default_rng(3)
    lists: dict[str, list[str]] = {"validation_list.txt": [], "testing_list.txt": []}
    for word in WORDS:
        for i in range(12):
            length = 16_000 if i % 3 else 11_000  # some clips are shorter than a second
            name = f"{word}/{i:08x}_nohash_0.wav"
            write_wave(folder / name, generator.normal(0, 3000, length).clip(-32768, 32767))
            if i in (0, 1):
                lists["validation_list.txt"].append(name)
            if i in (2, 3, 4):
                lists["testing_list.txt"].append(name)
    for name, lines in lists.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    for name in ("white_noise", "running_tap"):
        noise = generator.normal(0, 500, 60_000)
        write_wave(folder / "_background_noise_" / f"{name}.wav", noise)
    (folder / "_background_noise_" / "README.md").write_text("Noise.\n")


def cell_counts() -> np.ndarray:
    """Return counts (cells, genes) of three kinds of cells that differ in a tenth of the genes."""
    generator = np.random.default_rng(4)
    rates = generator.gamma(0.5, 0.4, GENES) + 0.01
    counts = []
    for kind in range(len(TYPES)):
        own = rates.copy()
        own[kind * 70 : (kind + 1) * 70] += 4
        depth = generator.uniform(0.6, 1.6, (CELLS_A_TYPE, 1))
        counts.append(generator.poisson(own * depth))
    return np.concatenate(counts)


def pbmc3k(folder: Path) -> None:
    folder.mkdir(parents=True)
    counts = cell_counts()
    barcodes = [f"CELL{i:04d}-1" for i in range(len(counts))]
    (folder / "barcodes.tsv").write_text("".join(f"{barcode}\n" for barcode in barcodes))
    (folder / "genes.tsv").write_text("".join(f"ENSG{i:05d}\tGENE{i}\n" for i in range(GENES)))
    cells, genes = counts.nonzero()
    head = (
        f"%%MatrixMarket matrix coordinate integer general\n%\n{GENES} {len(counts)} {len(cells)}"
    )
    lines = [f"{g + 1} {c + 1} {counts[c, g]}" for c, g in zip(cells, genes, strict=True)]
    (folder / "matrix.mtx").write_text("\n".join([head, *lines]) + "\n")
    labels = [f"{barcode},{TYPES[i // CELLS_A_TYPE]}\n" for i, barcode in enumerate(barcodes)]
    # Two cells have no label.
    (folder.parents[1] / "labels.csv").write_text("barcode,type\n" + "".join(labels[:-2]))
