/* Maps the memory of other processes. */

#include <stddef.h>
#include <stdint.h>

#include "executor/mapping.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>

const void *p2pdpt_map(int descriptor, uint64_t nbytes) {
    void *address = mmap(NULL, (size_t)nbytes, PROT_READ, MAP_SHARED, descriptor, 0);
    return address == MAP_FAILED ? NULL : address;
}

void p2pdpt_unmap(const void *address, uint64_t nbytes) {
    munmap((void *)(uintptr_t)address, (size_t)nbytes);
}
#else
#include <errno.h>

const void *p2pdpt_map(int descriptor, uint64_t nbytes) {
    (void)descriptor;
    (void)nbytes;
    errno = ENOSYS;
    return NULL;
}

void p2pdpt_unmap(const void *address, uint64_t nbytes) {
    (void)address;
    (void)nbytes;
}
#endif
