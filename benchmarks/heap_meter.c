/* Counts the bytes that PyTorch's CPU allocator holds, in all threads of a process.

   Loaded before all other libraries (LD_PRELOAD). PyTorch's profiler would miss what gloo's threads free. Only
   calls from libc10 count: oneDNN, inside libtorch_cpu, takes scratchpads from the same function. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SLOTS (1u << 20) /* of an open hash table; a power of two */
#define GONE ((void *)1) /* in a slot whose block was freed */

static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static void *blocks[SLOTS];
static size_t sizes[SLOTS];
static int64_t live, peak;
static int active;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void find(void) {
  next_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  next_free = dlsym(RTLD_NEXT, "free");
}

void meter_start(void) { active = 1; }
int64_t meter_live(void) { return live; }
int64_t meter_peak(void) { return peak; }
void meter_reset(void) {
  pthread_mutex_lock(&lock);
  peak = live;
  pthread_mutex_unlock(&lock);
}

static uint32_t slot_of(void *block) { return (uint32_t)(((uintptr_t)block >> 6) * 2654435761u) & (SLOTS - 1); }

static int is_allocator(void *caller) {
  static __thread void *asked;
  static __thread int answer;
  Dl_info info;
  if (caller != asked) {
    asked = caller;
    answer = dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10.so") != NULL;
  }
  return answer;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  if (!next_memalign) find();
  int failed = next_memalign(block, alignment, size);
  if (!active || failed || !is_allocator(__builtin_return_address(0))) return failed;
  pthread_mutex_lock(&lock);
  uint32_t slot = slot_of(*block);
  while (blocks[slot] && blocks[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
  blocks[slot] = *block;
  sizes[slot] = size;
  live += (int64_t)size;
  if (live > peak) peak = live;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *block) {
  if (active && block && ((uintptr_t)block & 63) == 0) { /* PyTorch aligns its blocks to 64 bytes */
    pthread_mutex_lock(&lock);
    uint32_t slot = slot_of(block);
    while (blocks[slot] && blocks[slot] != block) slot = (slot + 1) & (SLOTS - 1);
    if (blocks[slot] == block) {
      live -= (int64_t)sizes[slot];
      blocks[slot] = GONE;
    }
    pthread_mutex_unlock(&lock);
  }
  if (!next_free) find();
  next_free(block);
}
