"""Fashion-MNIST: clothing, in the format of MNIST."""

from .mnist import MNISTDataModule, idx_downloads


class FashionMNISTDataModule(MNISTDataModule):
    """60,000 training and 10,000 test images of 28 x 28 pixels, ten classes of clothing.

    Works like `MNISTDataModule`, but normalises with mean 0.2860 and standard deviation 0.3530.
    Checksums are computed for the unpacked files, because mirrors repack the archives.

        root/FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte, packed (.gz) or not

    Licence: MIT. Reference: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset
    for Benchmarking Machine Learning Algorithms", arXiv:1708.07747, 2017. 31 MB packed.

    Args:
        batch_size: Training batch size.
        eval_batch_size: Batch size for validation, test and prediction; `batch_size` if None.
        val_share: Share of the training images held out for validation.
        **options: Further arguments of `BaseDataModule`, such as `root` and `split_seed`.
    """

    class_names = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    folder = "FashionMNIST/raw"
    mean, std = 0.2860, 0.3530
    downloads = idx_downloads(
        folder,
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        (
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
            "md5:bef4ecab320f06d8554ea6380940ec79",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    )
    contents = (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    )
