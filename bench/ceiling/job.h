/* One timed job of a ceiling, and its clock. Mirrored by `JobStructure` in __init__.py. */
#ifndef MOONPOOL_CEILING_JOB_H
#define MOONPOOL_CEILING_JOB_H

#include <stdint.h>
#include <time.h>

struct job {
  uint32_t kind;  /* an operation or a variant, see the program */
  uint32_t count; /* blocks moved by one operation */
  uint64_t block_bytes;
  uint64_t span_bytes; /* offsets rotate over this much of both buffers */
  uint64_t spin_ns;    /* how long a receiver polls before it blocks */
  uint64_t minimum_ns;
  uint64_t minimum_operations;
  uint64_t maximum_operations; /* also the length of the array of latencies */
};

struct outcome {
  uint64_t operations;
  uint64_t elapsed_ns;
};

static inline uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline int job_goes_on(const struct job *job, uint64_t done, uint64_t elapsed_ns) {
  return done < job->maximum_operations && (done < job->minimum_operations || elapsed_ns < job->minimum_ns);
}

#endif
