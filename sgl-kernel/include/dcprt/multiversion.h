// One function, several instruction sets, chosen when the library is loaded.
#pragma once

// DCPRT_MULTIVERSION in front of a plain (non-template, non-inline) function compiles its loops for AVX2 and AVX-512
// beside the x86-64 baseline. Elsewhere, and where the C library has no ifunc, the baseline alone is compiled; so it is
// under ThreadSanitizer, which is not ready yet when the choice is made.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define DCPRT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DCPRT_MULTIVERSION
#endif
