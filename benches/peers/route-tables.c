/* DPDK's route tables: the answers of a list of operations, or what they cost.
 *
 *     route-tables lpm|fib|fib6 answers OPERATIONS ANSWERS [EAL options]
 *     route-tables lpm|fib|fib6 cycles OPERATIONS [EAL options] <LINES
 *
 * OPERATIONS is a file of records of 24 bytes (struct operation) in the byte order of the machine. Lookups between
 * changes are made together. ANSWERS gets 32 bits for each lookup, UINT32_MAX where there is no route. `cycles` prints
 * the cycles of the time-stamp counter of a change, the median of all, when the table is complete. For each line of
 * its input it prints those of a lookup of 64 addresses at a time: the median of windows of 16384 of the last lookups
 * of the file. A window is short, so most of them see no other program on the core.
 *
 *     cc -O3 -march=native route-tables.c $(pkg-config --cflags --libs libdpdk)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_fib.h>
#include <rte_fib6.h>
#include <rte_lpm.h>

enum { LOOKUP, INSERT, REMOVE };
enum { BURST = 64, WINDOW = 1 << 14, WINDOWS = 1024 };

struct operation {
	uint8_t kind, len, unused[2];
	uint32_t value;
	/* IPv4: the number in the first four bytes. IPv6: as in a packet. */
	uint8_t address[16];
};

enum table { LPM, FIB, FIB6 };
static struct rte_lpm *lpm;
static struct rte_fib *fib;
static struct rte_fib6 *fib6;

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, rte_strerror(rte_errno));
	exit(1);
}

static uint32_t number(const struct operation *op)
{
	uint32_t address;
	memcpy(&address, op->address, sizeof(address));
	return address;
}

static void create(enum table table, uint32_t routes)
{
	struct rte_lpm_config lpm_config = { .max_rules = routes, .number_tbl8s = 1 << 17 };
	struct rte_fib_conf config = { .type = RTE_FIB_DIR24_8, .default_nh = UINT32_MAX >> 1, .max_routes = routes };
	struct rte_fib6_conf config6 = { .type = RTE_FIB6_TRIE, .default_nh = UINT32_MAX >> 1, .max_routes = routes };
	config.dir24_8.nh_sz = RTE_FIB_DIR24_8_4B;
	config.dir24_8.num_tbl8 = 1 << 17;
	config6.trie.nh_sz = RTE_FIB6_TRIE_4B;
	config6.trie.num_tbl8 = 1 << 19;
	lpm = table == LPM ? rte_lpm_create("lpm", 0, &lpm_config) : NULL;
	fib = table == FIB ? rte_fib_create("fib", 0, &config) : NULL;
	fib6 = table == FIB6 ? rte_fib6_create("fib6", 0, &config6) : NULL;
	if (!lpm && !fib && !fib6)
		die("creating the table");
}

static int change(enum table table, const struct operation *op)
{
	int insert = op->kind == INSERT;
	switch (table) {
	case LPM:
		return insert ? rte_lpm_add(lpm, number(op), op->len, op->value)
			      : rte_lpm_delete(lpm, number(op), op->len);
	case FIB:
		return insert ? rte_fib_add(fib, number(op), op->len, op->value)
			      : rte_fib_delete(fib, number(op), op->len);
	default:
		return insert ? rte_fib6_add(fib6, op->address, op->len, op->value)
			      : rte_fib6_delete(fib6, op->address, op->len);
	}
}

static uint32_t addresses[BURST];
static uint8_t addresses6[BURST][16];

/* Looks up a burst. The caller provides the addresses as the table takes them. */
static inline void lookup(enum table table, const uint32_t *v4, uint8_t (*v6)[16], uint32_t *values, uint64_t *wide,
			  unsigned int count)
{
	if (table == LPM)
		rte_lpm_lookup_bulk(lpm, v4, values, count);
	else if (table == FIB)
		rte_fib_lookup_bulk(fib, (uint32_t *)v4, wide, count);
	else
		rte_fib6_lookup_bulk(fib6, v6, wide, count);
}

static uint32_t answer(enum table table, uint32_t value, uint64_t wide)
{
	if (table == LPM)
		return value & RTE_LPM_LOOKUP_SUCCESS ? value & 0xffffff : UINT32_MAX;
	return wide == UINT32_MAX >> 1 ? UINT32_MAX : (uint32_t)wide;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Measures a window of lookups. It is compiled for each table. */
static inline __attribute__((always_inline)) double window(enum table table, const uint32_t *v4, uint8_t (*v6)[16])
{
	uint32_t values[BURST];
	uint64_t wide[BURST];
	uint64_t from = rte_rdtsc();
	for (size_t at = 0; at < WINDOW; at += BURST) {
		lookup(table, v4 + at, v6 + at, values, wide, BURST);
		__asm__ volatile("" : : "r"(values), "r"(wide) : "memory");
	}
	return (double)(rte_rdtsc() - from) / WINDOW;
}

static void measure(enum table table, const struct operation *ops, size_t count)
{
	uint32_t *v4 = malloc(count * sizeof(*v4));
	uint8_t (*v6)[16] = malloc(count * sizeof(*v6));
	if (!v4 || !v6 || count < WINDOW)
		exit(1);
	for (size_t i = 0; i < count; i++) {
		v4[i] = number(&ops[i]);
		memcpy(v6[i], ops[i].address, 16);
	}
	for (int c; (c = getchar()) != EOF;) {
		static double cycles[WINDOWS];
		size_t at = 0;
		if (c != '\n')
			continue;
		for (int i = 0; i < WINDOWS; i++) {
			cycles[i] = table == LPM ? window(LPM, v4 + at, v6 + at)
				  : table == FIB ? window(FIB, v4 + at, v6 + at)
						 : window(FIB6, v4 + at, v6 + at);
			at = at + 2 * WINDOW <= count ? at + WINDOW : 0;
		}
		qsort(cycles, WINDOWS, sizeof(*cycles), ascending);
		printf("%.1f\n", cycles[WINDOWS / 2]);
		fflush(stdout);
	}
	free(v4);
	free(v6);
}

int main(int argc, char **argv)
{
	static const char *const names[] = { "lpm", "fib", "fib6" };
	int table = -1;
	for (int i = 0; argc > 1 && i < 3; i++)
		if (!strcmp(argv[1], names[i]))
			table = i;
	int answers = argc > 2 && !strcmp(argv[2], "answers");
	if (table < 0 || argc < 4 + answers) {
		fprintf(stderr, "usage: route-tables lpm|fib|fib6 answers|cycles OPERATIONS [ANSWERS] [EAL options]\n");
		return 2;
	}
	FILE *in = fopen(argv[3], "rb"), *out = answers ? fopen(argv[4], "wb") : NULL;
	if (!in || (answers && !out)) {
		perror("route-tables");
		return 1;
	}
	fseek(in, 0, SEEK_END);
	size_t count = ftell(in) / sizeof(struct operation);
	rewind(in);
	struct operation *ops = malloc(count * sizeof(*ops));
	if (!ops || fread(ops, sizeof(*ops), count, in) != count)
		return 1;
	argv[3 + answers] = argv[0];
	if (rte_eal_init(argc - 3 - answers, argv + 3 + answers) < 0)
		die("EAL");

	size_t routes = 0;
	for (size_t i = 0; i < count; i++)
		routes += ops[i].kind == INSERT;
	create(table, routes + 1);

	double *ticks = malloc((count + 1) * sizeof(*ticks));
	size_t changes = 0, last = count;
	if (!ticks)
		return 1;
	while (last > 0 && ops[last - 1].kind == LOOKUP)
		last--;
	for (size_t i = 0; i < (answers ? count : last);) {
		if (ops[i].kind != LOOKUP) {
			uint64_t from = rte_rdtsc();
			int error = change(table, &ops[i]);
			ticks[changes++] = (double)(rte_rdtsc() - from);
			/* Removing a route that does not exist is no error here. */
			if (error && ops[i].kind == INSERT) {
				fprintf(stderr, "route %zu: %s\n", i, strerror(-error));
				return 1;
			}
			i++;
			continue;
		}
		uint32_t values[BURST];
		uint64_t wide[BURST];
		unsigned int burst = 0;
		for (; burst < BURST && i < count && ops[i].kind == LOOKUP; burst++, i++) {
			addresses[burst] = number(&ops[i]);
			memcpy(addresses6[burst], ops[i].address, 16);
		}
		lookup(table, addresses, addresses6, values, wide, burst);
		for (unsigned int k = 0; answers && k < burst; k++) {
			uint32_t value = answer(table, values[k], wide[k]);
			fwrite(&value, sizeof(value), 1, out);
		}
	}
	if (answers)
		return fclose(out) ? 1 : 0;
	qsort(ticks, changes, sizeof(*ticks), ascending);
	printf("%.0f\n", changes ? ticks[changes / 2] : 0);
	fflush(stdout);
	measure(table, ops + last, count - last);
	return 0;
}
