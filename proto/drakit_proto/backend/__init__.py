"""Our contract with backends: drivers in any language, as the node plugin calls them."""
