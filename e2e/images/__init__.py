"""
The images of drakit, built without a container engine, and the image of the test pods.

Other modules only need `build_images`, which returns docker-archive tars and rebuilds only changed
parts. The Dockerfile is the same as with an engine; `python -m e2e.images context` creates its
build context. `vendor_image` is a vendor's image on top of the node plugin's; `backend_image` is
the image of the example backend, `backend_binary` only its program.
"""

from e2e.images.backend import backend_binary, backend_image
from e2e.images.build import build_images, download_parts
from e2e.images.cache import ImageError
from e2e.images.vendor import vendor_image

__all__ = (
    "ImageError",
    "backend_binary",
    "backend_image",
    "build_images",
    "download_parts",
    "vendor_image",
)
