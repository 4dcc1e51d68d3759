"""Small networks in the manner of well-known architectures, written as their users write them.

Each function gives (model, inputs) in fp64; nothing is random in their forwards. They are made for
what they do with tensors rather than for what they learn: rolls and windows, scans, scatters, Fourier
transforms, routing by values, loops, gradients inside of forward."""

from image_architectures import IMAGES
from other_architectures import OTHERS
from sequence_architectures import SEQUENCES

ARCHITECTURES = IMAGES | SEQUENCES | OTHERS
