// Core headers are compiled once for each target: every CPU instruction set, and every CUDA image. Each
// target has its own inline namespace, so that the linker never takes, say, an AVX-512 copy of a shared
// function for all machines.
#pragma once

#ifndef FUSEDCONV_TARGET
#error "define FUSEDCONV_TARGET: the namespace of the instruction set that this file is compiled for"
#endif

#include "inline.h"
