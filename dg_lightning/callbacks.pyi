# For type checkers in a checkout: the package lies in ../callbacks.
from callbacks import *
