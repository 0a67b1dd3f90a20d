"""Wide features on a GPU: the vendor's products into panels, generated kernels for the rest."""
