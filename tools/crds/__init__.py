"""CustomResourceDefinitions that are generated from the models that read them."""
