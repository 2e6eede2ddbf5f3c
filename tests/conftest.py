"""One thread in every test: bits are compared, and tests run side by side."""

import torch

torch.set_num_threads(1)
