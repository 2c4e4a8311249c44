# For type checkers in a checkout: the package lies in ../configs.
from configs import *
