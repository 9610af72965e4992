/* Cache lines by hand, for memory that several hosts share without their caches knowing of each other.
 *
 * The writer writes its lines back, the reader drops its own old copies before it reads (Intel SDM volume 2, CLWB and
 * CLFLUSHOPT; both are ordered by SFENCE, and loads after MFENCE come after the drop). Lines are 64 bytes. */
#ifndef MOONPOOL_CACHELINES_H
#define MOONPOOL_CACHELINES_H
#include <stddef.h>
#include <stdint.h>

#define MP_LINE ((uintptr_t)64)

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
enum { MP_CLFLUSH = 1, MP_CLFLUSHOPT = 2, MP_CLWB = 3 };
static int mp_line_back_way, mp_line_drop_way;

static void mp_line_ways(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) b = 0;
    mp_line_drop_way = b & (1u << 23) ? MP_CLFLUSHOPT : MP_CLFLUSH;
    mp_line_back_way = b & (1u << 24) ? MP_CLWB : mp_line_drop_way;
}
static inline void mp_line_do(int way, uintptr_t at) {
    if (way == MP_CLWB) __asm__ volatile(".byte 0x66; xsaveopt %0" : "+m"(*(volatile char *)at)); /* clwb */
    else if (way == MP_CLFLUSHOPT) __asm__ volatile(".byte 0x66; clflush %0" : "+m"(*(volatile char *)at)); /* clflushopt */
    else __asm__ volatile("clflush %0" : "+m"(*(volatile char *)at));
}
static inline void mp_lines(int way, const void *start, size_t n) {
    uintptr_t at = (uintptr_t)start & ~(MP_LINE - 1), end = (uintptr_t)start + n;
    for (; at < end; at += MP_LINE) mp_line_do(way, at);
}
/* What was stored in the range goes to memory; complete after the next store fence. */
static inline void mp_lines_back(const void *start, size_t n) { mp_lines(mp_line_back_way, start, n); }
/* Later loads from the range come from memory. */
static inline void mp_lines_drop(const void *start, size_t n) {
    mp_lines(mp_line_drop_way, start, n);
    __asm__ volatile("mfence" ::: "memory");
}
static const char *mp_line_kernel(void) {
    mp_line_ways();
    return mp_line_back_way == MP_CLWB ? "clwb" : mp_line_back_way == MP_CLFLUSHOPT ? "clflushopt" : "clflush";
}
#else
static inline void mp_lines_back(const void *start, size_t n) { (void)start; (void)n; }
static inline void mp_lines_drop(const void *start, size_t n) { (void)start; (void)n; }
static const char *mp_line_kernel(void) { return ""; }
#endif
#endif
