"""
The images of drakit, built without a container engine, and the image of the test pods.

`build_images` is all that others need: docker-archive tars, built again only where something
changed. The Dockerfile is the one that is used with an engine, too; `python -m e2e.images context`
makes its build context. `vendor_image` is a vendor's image on top of the node plugin's;
`backend_image` is that of the example backend, `backend_binary` its program alone.
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
