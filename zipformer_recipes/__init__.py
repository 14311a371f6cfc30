__version__ = "0.1.0"

import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's advice, stored with a path of this machine
