/* Maps the memory of other processes: read by cffi as declarations, and by the C file as its
 * header. Python's mmap would keep a descriptor for each map. */

/* Map the first `nbytes` of a descriptor, not 0, to be read only; NULL, and errno, on failure. */
const void *p2pdpt_map(int descriptor, uint64_t nbytes);

/* Unmap what p2pdpt_map returned. */
void p2pdpt_unmap(const void *address, uint64_t nbytes);
