/* Counts the bytes that PyTorch's CPU allocator holds, in all threads of a process.

   Loaded before all other libraries (LD_PRELOAD). PyTorch's profiler would miss what gloo's threads free. Only
   calls from libc10 count: oneDNN, inside libtorch_cpu, takes scratchpads from the same function. For products of
   16 bits it takes others from PyTorch's allocator, with no tensor around them: these are counted apart. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SLOTS (1u << 20) /* of an open hash table; a power of two */
#define GONE ((void *)1) /* in a slot whose block was freed */
#define FRAMES 5         /* up to whoever asked PyTorch's allocator for a block */
#define PLACES 1021      /* of code, whose answers are kept */

static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static void *blocks[SLOTS];
static size_t sizes[SLOTS];
static char in_scratch[SLOTS];
static int64_t live, peak, scratch, peak_with_scratch;
static int active;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void find(void) {
  next_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  next_free = dlsym(RTLD_NEXT, "free");
}

void meter_start(void) {
  void *frames[1];
  backtrace(frames, 1); /* loads the unwinder, which allocates */
  active = 1;
}
int64_t meter_live(void) { return live; }
int64_t meter_peak(void) { return peak; }
int64_t meter_peak_with_scratch(void) { return peak_with_scratch; }
void meter_reset(void) {
  pthread_mutex_lock(&lock);
  peak = live;
  peak_with_scratch = live + scratch;
  pthread_mutex_unlock(&lock);
}

static uint32_t slot_of(void *block) { return (uint32_t)(((uintptr_t)block >> 6) * 2654435761u) & (SLOTS - 1); }

enum place { TENSOR, SCRATCH, ALLOCATOR };

/* Where code is. Whoever makes a tensor has a name in its library; the function that PyTorch gives to oneDNN has
   none. Answers are kept, since looking for a name takes a millisecond. */
static enum place place_of(void *code) {
  static __thread void *asked[PLACES];
  static __thread enum place answers[PLACES];
  unsigned slot = (unsigned)((uintptr_t)code >> 2) % PLACES;
  if (asked[slot] != code) {
    Dl_info info;
    int known = dladdr(code, &info) && info.dli_fname;
    asked[slot] = code;
    answers[slot] = known && strstr(info.dli_fname, "libc10.so") ? ALLOCATOR
                    : known && !info.dli_sname                   ? SCRATCH
                                                                 : TENSOR;
  }
  return answers[slot];
}

static int for_scratch(void) {
  void *frames[FRAMES];
  int count = backtrace(frames, FRAMES), first = 1;
  while (first < count && place_of(frames[first]) == ALLOCATOR) first++;
  return first < count && place_of(frames[first]) == SCRATCH;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  if (!next_memalign) find();
  int failed = next_memalign(block, alignment, size);
  if (!active || failed || place_of(__builtin_return_address(0)) != ALLOCATOR) return failed;
  int no_tensor = for_scratch();
  pthread_mutex_lock(&lock);
  uint32_t slot = slot_of(*block);
  while (blocks[slot] && blocks[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
  blocks[slot] = *block;
  sizes[slot] = size;
  in_scratch[slot] = (char)no_tensor;
  *(no_tensor ? &scratch : &live) += (int64_t)size;
  if (live > peak) peak = live;
  if (live + scratch > peak_with_scratch) peak_with_scratch = live + scratch;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *block) {
  if (active && block && ((uintptr_t)block & 63) == 0) { /* PyTorch aligns its blocks to 64 bytes */
    pthread_mutex_lock(&lock);
    uint32_t slot = slot_of(block);
    while (blocks[slot] && blocks[slot] != block) slot = (slot + 1) & (SLOTS - 1);
    if (blocks[slot] == block) {
      *(in_scratch[slot] ? &scratch : &live) -= (int64_t)sizes[slot];
      blocks[slot] = GONE;
    }
    pthread_mutex_unlock(&lock);
  }
  if (!next_free) find();
  next_free(block);
}
