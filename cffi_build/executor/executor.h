/* Replays plans in shared memory: read by cffi as declarations, and by the C file as its header.
 * No preprocessor here but constants. */

#define P2PDPT_EXECUTOR_ABI 3

/* What p2pdpt_advance came back for. */
#define P2PDPT_IDLE 0      /* nothing is active */
#define P2PDPT_DONE 1      /* a round is complete */
#define P2PDPT_WEIGHTS 2   /* all have entered a round, with other weights than it expects */
#define P2PDPT_POKED 3     /* the caller has something new */
#define P2PDPT_ABORTED 4   /* the abort word was set; nothing is touched any more */
#define P2PDPT_LATE 5      /* the executor is brief, and would have to sleep */

/* One rank's progress in one bucket, in its own memory, which the others map read-only.
 * 64 bytes, so that no two ranks write one cache line. */
typedef struct {
    uint64_t count;    /* elements finished in plan order, over all rounds */
    uint64_t entered;  /* rounds entered */
    double weight;     /* of the contribution to the round entered last */
    uint64_t spare[5];
} p2pdpt_line;

/* One rank's bell: how often it made progress anywhere, and whether it sleeps. */
typedef struct {
    uint32_t rings;
    uint32_t sleeping;
    uint64_t spare[7];
} p2pdpt_bell;

/* Wait until a rank has finished `need` elements of its plan, and with `slope` one more for
 * each element folded. */
typedef struct {
    uint32_t rank;
    uint32_t slope;
    uint64_t need;
} p2pdpt_wait;

/* One fold; `length` is not 0. The arguments are those of p2pdpt_fold. */
typedef struct {
    void *out;
    const void *const *sources;
    const char *wide;
    const double *scales;
    const p2pdpt_wait *waits;
    uint64_t length;
    double divisor;
    uint32_t source_count;
    uint32_t wait_count;
    int32_t combine;
    int32_t out_wide;
    int32_t divide;
    int32_t shared; /* whether others read the output before the fold ends */
} p2pdpt_step;

/* One round of one bucket: a plan with addresses, and how far it has come. */
typedef struct {
    const p2pdpt_step *steps;
    p2pdpt_line *const *lines; /* of all ranks; written only at `rank` */
    const uint64_t *bases;     /* of all ranks: `count` when the round begins */
    const uint64_t *totals;    /* of all ranks: elements of its plan */
    double *weights;           /* of all ranks: expected; what was found when they differ */
    uint64_t number;           /* the round: `entered` of whoever takes part is at least this */
    uint32_t step_count;
    uint32_t size;
    uint32_t rank;
    int32_t dtype;
    /* Where it is. */
    uint32_t state; /* 0 waits for all to enter, 1 folds, 2 waits for the others, 3 complete */
    uint32_t step;
    uint64_t offset;
    uint64_t finished;
} p2pdpt_round;

/* What one executor waits with. */
typedef struct {
    p2pdpt_bell *const *bells; /* of all ranks; written only at `rank` */
    uint32_t *abort;           /* set to leave at once */
    uint32_t *poke;            /* set to come back for something new */
    uint32_t size;
    uint32_t rank;
    uint32_t spins;  /* pauses before the processor is given away */
    uint32_t yields; /* times it is given away before sleeping */
    int32_t brief;   /* come back instead of sleeping */
    int32_t path;    /* of p2pdpt_fold */
    uint32_t segment; /* elements folded between two looks at the outside */
} p2pdpt_executor;

/* Publish that this rank takes part in a round, with a weight. */
void p2pdpt_enter(const p2pdpt_executor *executor, p2pdpt_line *line, uint64_t number,
                  double weight);

/* Advance `count` rounds until one of the reasons above; `*which` tells the round.
 * Rounds that are complete or have stopped for their weights must be taken out. */
int p2pdpt_advance(const p2pdpt_executor *executor, p2pdpt_round *const *rounds, uint32_t count,
                   uint32_t *which);

/* Let the thread that is in p2pdpt_advance come back soon, after setting `poke` or `abort`. */
void p2pdpt_rouse(const p2pdpt_executor *executor);
