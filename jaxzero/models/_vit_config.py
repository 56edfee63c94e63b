"""Configuration of a Vision Transformer, as a frozen dataclass that validates itself."""

import dataclasses

from ._encoder_base import EncoderBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderBase):
    """Sizes of a Vision Transformer, and how it is computed.

    The defaults are those of ViT-Base with patches of 16 pixels, without a classifier. Fields that
    all encoders share are those of `EncoderConfig`.

    Args:
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch, in pixels. Pixels beyond the last whole patch are
            not seen.
        num_channels: channels of the images.
        num_labels: labels of the classifier; 0 without a classifier.
        query_key_value_bias: True if queries, keys and values have biases.
        hidden_dropout: rate of what enters the first layer and of what each half of a layer adds.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    num_channels: int = 3
    num_labels: int = 0
    query_key_value_bias: bool = True
    hidden_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("image_size", "patch_size"):
            given = getattr(self, name)
            if len(given) != 2 or not all(type(size) is int and size > 0 for size in given):
                raise ValueError(
                    f"`{name}` must be a pair of positive integers, height and width; got {given!r}."
                )
        if 0 in self.grid:
            raise ValueError(
                f"`patch_size` must not exceed `image_size`; got {self.patch_size} and "
                f"{self.image_size}: no patch fits into the image."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def num_patches(self) -> int:
        """Patches of an image; the class token comes on top."""
        rows, columns = self.grid
        return rows * columns

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch, over all channels."""
        height, width = self.patch_size
        return self.num_channels * height * width

    def _may_be_zero(self) -> tuple[str, ...]:
        return ("num_labels",)
