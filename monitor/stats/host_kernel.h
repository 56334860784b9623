/* What the host kernel offers to other modules in C: a capsule in `monitor.stats._host_kernel`. */

#ifndef MONITOR_HOST_KERNEL_H
#define MONITOR_HOST_KERNEL_H

#include <stddef.h>

enum format { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT64, FORMATS };

/* Whether the elements are read in double precision. */
static inline int is_wide(enum format format) { return format == FLOAT64 || format == INT64; }

enum { HIGHER = 1, CHECK_SUMS = 2 }; /* what is wanted beside the other columns */

/* Its name changes whenever the struct does, so that modules of different builds do not find each other. */
#define KERNEL_NAME "KERNEL_4"
#define KERNEL_CAPSULE "monitor.stats._host_kernel." KERNEL_NAME

struct host_kernel {
    int columns, bins; /* of a row, and of a histogram */
    /* Writes the partials of `n` elements, at least one, into `row`; returns 0, with nothing written, if it cannot. The caller holds
     * the GIL, which is released while many elements are read. `bins`: where the number of magnitudes in each bin is written, unless
     * it is NULL; only for elements that are not wide. */
    int (*reduce)(const void *x, size_t n, enum format format, double bound, int wanted, double *row, double *bins);
    /* The same for callers that do not hold the GIL. */
    int (*reduce_unlocked)(const void *x, size_t n, enum format format, double bound, int wanted, double *row, double *bins);
};

#endif
