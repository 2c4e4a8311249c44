# For type checkers in a checkout: the package lies in ../datamodules.
from datamodules import *
