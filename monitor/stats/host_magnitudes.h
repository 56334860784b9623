/* Histograms of magnitudes: how many elements have each exponent, and how many lie between two magnitudes. Included by host_kernel.c.
 *
 * The bits of a float32 without its sign are its magnitude: of two numbers the greater has the greater bits. Adding the greatest
 * mantissa before the mantissa is shifted out counts a power of two to the numbers below it, which is the upper end of its bin. */

#define EXPONENTS 257 /* 0: zeros. 255: magnitudes above 2^127, and Inf. 256: NaN. */
#define TABLES 8      /* An increment waits for the last one of the same counter, so neighbours count in different tables. */

static INLINE uint32_t magnitude_bits(const unsigned char *piece, size_t j) {
    uint32_t bits;
    memcpy(&bits, piece + 4 * j, sizeof bits);
    return bits & 0x7fffffffu;
}

/* Adds to `counts`, of EXPONENTS numbers. */
static INLINE void count_format(const unsigned char *x, size_t n, enum format format, int64_t *counts) {
    uint32_t tables[TABLES][EXPONENTS];
    for (size_t i = 0; i < n;) {
        size_t end = n - i > (size_t)1 << 31 ? i + ((size_t)1 << 31) : n; /* no counter overflows */
        memset(tables, 0, sizeof tables);
        while (i < end) {
            float widened[PIECE];
            uint16_t exponents[PIECE];
            size_t count = end - i > PIECE ? PIECE : end - i, j = 0;
            const unsigned char *piece = piece_float(x, i, count, format, widened);
            for (size_t k = 0; k < count; k++) {
                exponents[k] = (uint16_t)((magnitude_bits(piece, k) + 0x7fffffu) >> 23);
            }
            for (; j + TABLES <= count; j += TABLES) {
                for (size_t k = 0; k < TABLES; k++) {
                    tables[k][exponents[j + k]]++;
                }
            }
            for (; j < count; j++) {
                tables[0][exponents[j]]++;
            }
            i += count;
        }
        for (int k = 0; k < TABLES; k++) {
            for (int j = 0; j < EXPONENTS; j++) {
                counts[j] += tables[k][j];
            }
        }
    }
}

/* The number of elements whose magnitude has bits above `low`, and at most `high`. */
static INLINE size_t within_format(const unsigned char *x, size_t n, enum format format, uint32_t low, uint32_t high) {
    size_t found = 0;
    for (size_t i = 0; i < n;) {
        float widened[PIECE];
        size_t count = n - i > PIECE ? PIECE : n - i;
        uint32_t here = 0;
        const unsigned char *piece = piece_float(x, i, count, format, widened);
        for (size_t j = 0; j < count; j++) {
            here += magnitude_bits(piece, j) - low - 1 < high - low; /* modulo 2^32: one comparison for both ends */
        }
        found += here;
        i += count;
    }
    return found;
}

/* As above, in a separate loop per format, in which the format is a constant. With `counts` all exponents are counted; else the
 * magnitudes from `low` to `high`, which are returned. */
static INLINE size_t look_at_magnitudes(const void *x, size_t n, enum format format, int64_t *counts, uint32_t low, uint32_t high) {
    switch (format) {
    case FLOAT32: return counts != NULL ? (count_format(x, n, FLOAT32, counts), 0) : within_format(x, n, FLOAT32, low, high);
    case BFLOAT16: return counts != NULL ? (count_format(x, n, BFLOAT16, counts), 0) : within_format(x, n, BFLOAT16, low, high);
    default: return counts != NULL ? (count_format(x, n, FLOAT16, counts), 0) : within_format(x, n, FLOAT16, low, high);
    }
}
