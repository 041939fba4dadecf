/*
 * A poll-mode program for libmana, an oracle of the emulated device. It is written from manadv(7) and DPDK's layouts,
 * independently of any code of this project. Port 1 must be looped back to itself. With the argument "scan" it omits
 * errors that only a doorbell reveals.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <sys/mman.h>
#include <infiniband/manadv.h>
#include <infiniband/verbs.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: failed: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
			exit(1); \
		} \
	} while (0)

static long allocated;

static void *allocate(size_t size, void *data)
{
	void *memory = NULL;
	(void)data;
	CHECK(posix_memalign(&memory, 4096, size ? size : 4096) == 0);
	memset(memory, 0, size ? size : 4096);
	allocated++;
	return memory;
}

static void release(void *memory, void *data)
{
	(void)data;
	if (memory)
		allocated--;
	free(memory);
}

static struct ibv_context *context;
static struct ibv_pd *pd, *parent;
static struct ibv_mr *mr;
static uint8_t *pool;
static bool scan;

#define POOL (4 << 20)
#define RX_BUFFER 9216
#define QUEUES 4

struct queue {
	struct ibv_cq *cq;
	uint8_t *entries;
	uint32_t count, taken;
	uint8_t *ring;
	uint32_t size, head, id;
	volatile uint64_t *page;
};

static struct queue tx, rx[QUEUES];
static struct ibv_qp *tx_qp, *rss_qp;
static struct ibv_wq *wqs[QUEUES];
static struct ibv_rwq_ind_table *table;
static uint32_t vport, tx_cq_id;

static void completion_queue(struct queue *queue, int entries)
{
	queue->cq = ibv_create_cq(context, entries, NULL, NULL, 0);
	CHECK(queue->cq);
}

static void know_cq(struct queue *queue, uint32_t *id)
{
	struct manadv_cq out;
	struct manadv_obj object = { .cq = { .in = queue->cq, .out = &out } };
	CHECK(manadv_init_obj(&object, MANADV_OBJ_CQ) == 0);
	queue->entries = out.buf;
	queue->count = out.count;
	queue->taken = out.count;
	if (id)
		*id = out.cq_id;
}

static void create_tx(void)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 256, .max_send_sge = 4, .max_recv_wr = 1, .max_recv_sge = 1 } };
	struct manadv_qp out;
	struct manadv_obj object = { .qp = { .out = &out } };

	memset(&tx, 0, sizeof(tx));
	completion_queue(&tx, 200); /* not a power of two */
	attr.send_cq = attr.recv_cq = tx.cq;
	CHECK(!ibv_create_qp(pd, &attr) && errno == EINVAL); /* without a parent domain */
	tx_qp = ibv_create_qp(parent, &attr);
	CHECK(tx_qp);
	object.qp.in = tx_qp;
	CHECK(manadv_init_obj(&object, MANADV_OBJ_QP) == 0);
	CHECK(out.sq_count == 256 && out.sq_id && out.db_page);
	tx.ring = out.sq_buf;
	tx.size = out.sq_size;
	tx.id = out.sq_id;
	tx.page = out.db_page;
	vport = out.tx_vp_offset;
	know_cq(&tx, &tx_cq_id);
	CHECK(tx.count == 200 && tx_cq_id != 0xffffffff);
}

static void create_rx(uint64_t fields)
{
	static uint8_t key[40] = {
		0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
		0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
		0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa };
	struct ibv_rwq_ind_table_init_attr table_attr = { .log_ind_tbl_size = 2, .ind_tbl = wqs };
	struct ibv_qp_init_attr_ex attr = {
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE,
		.qp_type = IBV_QPT_RAW_PACKET, .pd = parent,
		.rx_hash_conf = { .rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
			.rx_hash_key_len = 40, .rx_hash_key = key, .rx_hash_fields_mask = fields } };
	int i;

	for (i = 0; i < QUEUES; i++) {
		struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 64, .max_sge = 1, .pd = pd };
		memset(&rx[i], 0, sizeof(rx[i]));
		completion_queue(&rx[i], 64);
		wq.cq = rx[i].cq;
		wqs[i] = ibv_create_wq(context, &wq);
		CHECK(wqs[i]);
	}
	table = ibv_create_rwq_ind_table(context, &table_attr);
	CHECK(table);
	CHECK(ibv_destroy_wq(wqs[0]) == EBUSY);
	attr.rwq_ind_tbl = table;
	attr.rx_hash_conf.rx_hash_key_len = 39;
	CHECK(!ibv_create_qp_ex(context, &attr));
	attr.rx_hash_conf.rx_hash_key_len = 40;
	rss_qp = ibv_create_qp_ex(context, &attr);
	CHECK(rss_qp);
	for (i = 0; i < QUEUES; i++) {
		struct manadv_rwq out;
		struct manadv_obj object = { .rwq = { .in = wqs[i], .out = &out } };
		CHECK(manadv_init_obj(&object, MANADV_OBJ_RWQ) == 0);
		CHECK(out.count == 64);
		rx[i].ring = out.buf;
		rx[i].size = out.size;
		rx[i].id = out.wq_id;
		rx[i].page = out.db_page;
		know_cq(&rx[i], NULL);
	}
}

static void bell(struct queue *queue, unsigned register_at)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	queue->page[register_at / 8] = (uint64_t)(queue->head * 32) << 32 | queue->id;
}

static uint32_t *unit(struct queue *queue, uint32_t offset)
{
	return (uint32_t *)(queue->ring + ((queue->head * 32 + offset) & (queue->size - 1)));
}

static void sge(uint32_t *at, const void *data, uint32_t length, uint32_t key)
{
	*(uint64_t *)at = (uintptr_t)data;
	at[2] = key;
	at[3] = length;
}

static uint8_t *rx_buffer(int queue, uint32_t number)
{
	return pool + (1 << 20) + (queue * 64 + number % 64) * (size_t)RX_BUFFER;
}

static void post_rx(int i, uint32_t length, uint32_t key)
{
	uint32_t *wqe = unit(&rx[i], 0);
	sge(wqe + 4, rx_buffer(i, rx[i].head), length, key);
	wqe[2] = wqe[3] = 0;
	wqe[0] = 0;
	__atomic_store_n(&wqe[1], 1 | 2 << 8, __ATOMIC_RELEASE);
	rx[i].head++;
	bell(&rx[i], 0x400);
}

struct part {
	const void *data;
	uint32_t length, key;
};

struct oob {
	uint32_t bits;       /* word 0 without format and completion queue */
	uint32_t transport;  /* offset */
	int vlan;            /* tag control, or -1 */
	uint32_t mss, port, cq;
};

static struct oob plain(void)
{
	struct oob oob = { .vlan = -1, .port = vport, .cq = tx_cq_id };
	return oob;
}

static void send_parts(const struct part *parts, int count, const struct oob *oob)
{
	bool is_long = oob->vlan >= 0;
	uint32_t oob_bytes = is_long ? 24 : 8, units = (8 + oob_bytes + 16 * count + 31) / 32, *wqe = unit(&tx, 0);
	int i;

	for (i = count - 1; i >= 0; i--)
		sge(unit(&tx, 8 + oob_bytes + 16 * i), parts[i].data, parts[i].length, parts[i].key);
	wqe[2] = (is_long ? 1 : 0) | oob->bits | oob->cq << 8;
	wqe[3] = oob->transport | (tx.id >> 10 & 0x3fff) << 10 | (oob->port & 0xff) << 24;
	if (is_long) {
		wqe[4] = 1 << 3 | (oob->vlan >> 13) << 16 | (oob->vlan & 0xfff) << 20;
		wqe[5] = wqe[6] = wqe[7] = 0;
	}
	wqe[0] = oob->mss ? parts[0].length << 24 : 0;
	__atomic_store_n(&wqe[1], count | (is_long ? 6 : 2) << 8 | (oob->mss ? 1 << 11 : 0) | oob->mss << 16,
		__ATOMIC_RELEASE);
	tx.head += units;
	bell(&tx, 0);
}

static void send_bytes(const void *data, uint32_t length, const struct oob *oob)
{
	struct part part = { data, length, mr->lkey };
	send_parts(&part, 1, oob);
}

/* Waits for the next entry of a completion queue and returns it. */
static uint32_t *completion(struct queue *queue)
{
	uint32_t *entry = (uint32_t *)(queue->entries + (queue->taken % queue->count) * 64), owner;
	struct timespec start, now;

	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		owner = __atomic_load_n(&entry[15], __ATOMIC_ACQUIRE) >> 29;
		if (owner == (queue->taken / queue->count & 7))
			break;
		CHECK(owner == ((queue->taken / queue->count - 1) & 7));
		sched_yield(); /* the device may need this core */
		clock_gettime(CLOCK_MONOTONIC, &now);
		CHECK(now.tv_sec - start.tv_sec < 30);
	}
	queue->taken++;
	return entry;
}

static bool empty(struct queue *queue)
{
	uint32_t *entry = (uint32_t *)(queue->entries + (queue->taken % queue->count) * 64);
	return __atomic_load_n(&entry[15], __ATOMIC_ACQUIRE) >> 29 == ((queue->taken / queue->count - 1) & 7);
}

static void sent(uint32_t type)
{
	uint32_t *entry = completion(&tx);
	if ((entry[0] & 0x3f) != type)
		fprintf(stderr, "completion of type %u instead of %u\n", entry[0] & 0x3f, type);
	CHECK((entry[0] & 0x3f) == type);
	CHECK((entry[0] >> 6 & 3) == 1);
	CHECK((entry[15] & 0xffffff) == tx.id && (entry[15] >> 24 & 1) == 1);
}

static uint16_t fold(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static uint32_t add(const uint8_t *bytes, uint32_t length)
{
	uint32_t sum = 0, i;
	for (i = 0; i < length; i++)
		sum += i & 1 ? bytes[i] : bytes[i] << 8;
	return sum;
}

/*
 * Builds an Ethernet frame with IPv4 and UDP or TCP. The checksums are those that a driver leaves to the device:
 * zero in IP, and the sum of the pseudo header in the transport header.
 */
static uint32_t packet(uint8_t *frame, uint8_t protocol, uint32_t payload, uint16_t flow, bool large)
{
	uint32_t header = protocol == 6 ? 20 : 8, length = 14 + 20 + header + payload, i, pseudo;
	uint8_t *ip = frame + 14, *l4 = ip + 20;

	memset(frame, 0, 14 + 20 + header);
	memcpy(frame, "\x02\x00\x00\x00\x01\x01\x02\x00\x00\x00\x09\x09\x08\x00", 14);
	ip[0] = 0x45;
	ip[2] = (length - 14) >> 8;
	ip[3] = length - 14;
	ip[8] = 64;
	ip[9] = protocol;
	memcpy(ip + 12, "\x0a\x00\x00\x01\x0a\x00\x00\x02", 8);
	l4[0] = flow >> 8;
	l4[1] = flow;
	l4[3] = 9;
	if (protocol == 6) {
		l4[12] = 5 << 4;
		l4[13] = 0x18;
	} else {
		l4[4] = (8 + payload) >> 8;
		l4[5] = 8 + payload;
	}
	for (i = 0; i < payload; i++)
		l4[header + i] = i * 7 + flow;
	pseudo = add(ip + 12, 8) + protocol + (large ? 0 : header + payload);
	i = protocol == 6 ? 16 : 6;
	l4[i] = fold(pseudo) >> 8;
	l4[i + 1] = fold(pseudo);
	return length;
}

static bool checksums_right(const uint8_t *frame, uint32_t length)
{
	const uint8_t *ip = frame + 14;
	uint32_t l4 = (ip[2] << 8 | ip[3]) - 20;
	return length >= 34 + l4 && fold(add(ip, 20)) == 0xffff &&
	       fold(add(ip + 20, l4) + add(ip + 12, 8) + ip[9] + l4) == 0xffff;
}

/* Returns the next received packet of queue i: its buffer and its completion. */
static uint8_t *received(int i, uint32_t **entry)
{
	uint8_t *buffer;
	static uint32_t next[QUEUES];
	*entry = completion(&rx[i]);
	CHECK(((*entry)[0] & 0x3f) == 1);
	CHECK(((*entry)[15] & 0xffffff) == rx[i].id && ((*entry)[15] >> 24 & 1) == 0);
	buffer = rx_buffer(i, next[i]++);
	return buffer;
}

/* Waits for a packet on any queue; returns the queue. */
static int arrival(void)
{
	struct timespec start, now;
	int i;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		for (i = 0; i < QUEUES; i++)
			if (!empty(&rx[i]))
				return i;
		sched_yield(); /* the device may need this core */
		clock_gettime(CLOCK_MONOTONIC, &now);
		CHECK(now.tv_sec - start.tv_sec < 30);
	}
}

#define IP_CSUM (1 << 2 | 1 << 4)
#define TCP_CSUM (1 << 5)
#define UDP_CSUM (1 << 6)
#define NO_COMPLETION (1 << 7)

static void traffic(void)
{
	struct oob oob = plain();
	uint32_t length, *entry, i, hit = 0;
	uint8_t *frame = pool, *got;
	int queue;

	/* All rings wrap around several times. */
	for (i = 0; i < 1000; i++) {
		length = packet(frame, 17, i % 1200 + 18, i, false);
		oob = plain();
		oob.bits = IP_CSUM | UDP_CSUM;
		oob.transport = 34;
		send_bytes(frame, length, &oob);
		sent(32);
		queue = arrival();
		hit |= 1 << queue;
		got = received(queue, &entry);
		CHECK((entry[2] & 0xffff) == length);
		CHECK(checksums_right(got, length));
		CHECK(memcmp(got + 42, frame + 42, length - 42) == 0);
		CHECK(entry[1] >> 25 & 1 && !(entry[1] >> 26 & 1));  /* IP checksum valid */
		CHECK(entry[1] >> 29 & 1 && !(entry[1] >> 30 & 1));  /* UDP checksum valid */
		CHECK((entry[1] >> 16 & 0x1ff) == 4);                /* hashed as UDP over IPv4 */
		CHECK((entry[4] % 64 % QUEUES) == (uint32_t)queue);  /* the hash selects the queue */
		CHECK(!(entry[1] >> 12 & 1));
		post_rx(queue, RX_BUFFER, mr->lkey);
	}
	CHECK(hit == (1 << QUEUES) - 1);

	/* Suppressed completions: one completion covers all descriptors. */
	oob = plain();
	length = packet(frame, 17, 100, 1, false);
	for (i = 0; i < 8; i++) {
		oob.bits = i < 7 ? NO_COMPLETION : 0;
		send_bytes(frame, length, &oob);
	}
	sent(32);
	CHECK(empty(&tx));
	for (i = 0; i < 8; i++) {
		queue = arrival();
		got = received(queue, &entry);
		CHECK(entry[1] >> 26 & 1);  /* no header checksum was requested */
		CHECK(entry[1] >> 30 & 1);
		post_rx(queue, RX_BUFFER, mr->lkey);
	}

	/* VLAN tags in both directions, and 9000 bytes in four pieces that sometimes wrap around the ring. */
	for (i = 0; i < 300; i++) {
		struct part parts[4];
		uint32_t at = 0, k;
		length = packet(frame, 6, 9000 - 40, i, false);
		for (k = 0; k < 4; k++) {
			parts[k].data = frame + at;
			parts[k].length = k == 3 ? length - at : 1000 + 137 * k;
			parts[k].key = mr->lkey;
			at += parts[k].length;
		}
		oob = plain();
		oob.bits = IP_CSUM | TCP_CSUM;
		oob.transport = 34;
		oob.vlan = i % 3 ? (int)(0x6000 | (i + 1)) : -1;
		send_parts(parts, 4, &oob);
		sent(32);
		queue = arrival();
		got = received(queue, &entry);
		CHECK((entry[2] & 0xffff) == length);
		CHECK(checksums_right(got, length));
		CHECK(entry[1] >> 27 & 1);
		CHECK((entry[1] >> 12 & 1) == (i % 3 != 0));
		if (i % 3)
			CHECK((entry[1] & 0xfff) == i + 1);
		post_rx(queue, RX_BUFFER, mr->lkey);
	}

	/* Segmentation. */
	{
		struct part parts[2];
		uint32_t mss = 1448, seen = 0;
		length = packet(frame, 6, 10 * mss + 100, 7, true);
		parts[0] = (struct part){ frame, 54, mr->lkey };
		parts[1] = (struct part){ frame + 54, length - 54, mr->lkey };
		oob = plain();
		oob.bits = IP_CSUM | TCP_CSUM;
		oob.transport = 34;
		oob.mss = mss;
		send_parts(parts, 2, &oob);
		sent(32);
		for (i = 0; i < 11; i++) {
			queue = arrival();
			got = received(queue, &entry);
			length = entry[2] & 0xffff;
			CHECK(length == 54 + (i < 10 ? mss : 100));
			CHECK(checksums_right(got, length));
			CHECK(ntohl(*(uint32_t *)(got + 38)) == i * mss);
			CHECK(!!(got[47] & 8) == (i == 10));
			CHECK(memcmp(got + 54, frame + 54 + i * mss, length - 54) == 0);
			seen |= 1 << i;
			post_rx(queue, RX_BUFFER, mr->lkey);
		}
		CHECK(seen == 0x7ff);
	}
}

static void destroy_tx(void)
{
	CHECK(ibv_destroy_cq(tx.cq) == EBUSY);
	CHECK(ibv_destroy_qp(tx_qp) == 0);
	CHECK(ibv_destroy_cq(tx.cq) == 0);
}

static void again(void)
{
	destroy_tx();
	create_tx();
}

static void refusals(void)
{
	struct oob oob = plain();
	struct part parts[2];
	uint8_t *frame = pool;
	uint32_t length = packet(frame, 17, 100, 1, false), i;

	/* Invalid packets after which the queue continues. */
	oob.port = vport + 1;
	send_bytes(frame, length, &oob);
	sent(39);
	oob = plain();
	oob.cq++;
	send_bytes(frame, length, &oob);
	sent(35);
	oob = plain();
	oob.bits = IP_CSUM | TCP_CSUM; /* but the packet is UDP */
	oob.transport = 34;
	send_bytes(frame, length, &oob);
	sent(37);
	oob = plain();
	send_bytes(frame, 9100, &oob);
	sent(34);
	send_bytes(frame, 10, &oob);
	sent(37);

	/* Invalid descriptors that stop the queue. */
	parts[0] = (struct part){ frame, length, mr->lkey + 1 };
	send_parts(parts, 1, &oob);
	sent(42);
	if (!scan) {
		send_bytes(frame, length, &oob);
		CHECK(empty(&tx));
	}
	again();
	oob = plain();
	parts[0] = (struct part){ frame, 60, mr->lkey };
	parts[1] = (struct part){ pool + POOL - 10, 40, mr->lkey }; /* exceeds its memory region */
	send_parts(parts, 2, &oob);
	sent(42);
	again();
	if (!scan) {
		/* An invalid tail is ignored. */
		tx.page[0] = (uint64_t)(tx.head * 32 + 7) << 32 | tx.id;
		tx.page[0] = (uint64_t)(tx.head * 32 + tx.size + 32) << 32 | tx.id;
		tx.page[0] = (uint64_t)(tx.head * 32 - 32) << 32 | tx.id;
		tx.page[0] = (uint64_t)64 << 32 | (tx.id + 999);
		CHECK(empty(&tx));
	}
	oob = plain();
	for (i = 0; i < 300; i++) {
		send_bytes(frame, length, &oob);
		sent(32);
	}
}

/* The device can use registered memory after it is unmapped, because the kernel keeps pinned pages. */
static void unmapped(void)
{
	struct oob oob = plain();
	uint8_t *frame = mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *own;
	struct part part;
	int i;

	CHECK(frame != MAP_FAILED);
	own = ibv_reg_mr(pd, frame, 2 * 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK(own);
	CHECK(munmap(frame, 2 * 4096) == 0);
	part = (struct part){ frame + 4096 - 30, 60, own->lkey };
	for (i = 0; i < 3; i++) {
		send_parts(&part, 1, &oob);
		sent(32);
	}
	CHECK(ibv_dereg_mr(own) == 0);
}

int main(int count, char **arguments)
{
	struct ibv_device **devices;
	struct ibv_parent_domain_init_attr parent_attr = {
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, .pd_context = (void *)1 };
	struct ibv_device_attr_ex attr;
	struct ibv_port_attr port;
	struct manadv_ctx_allocators allocators = { allocate, release, NULL };
	int devices_count, i;
	uint32_t n;

	scan = count > 1 && strcmp(arguments[1], "scan") == 0;
	devices = ibv_get_device_list(&devices_count);
	CHECK(devices && devices_count >= 1);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	ibv_free_device_list(devices);
	CHECK(ibv_query_device_ex(context, NULL, &attr) == 0 && attr.orig_attr.max_qp_wr >= 256);
	CHECK(ibv_query_port(context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE);
	CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET);
	CHECK(ibv_query_port(context, 99, &port) == EINVAL);
	CHECK(manadv_set_context_attr(context, MANADV_CTX_ATTR_BUF_ALLOCATORS, &allocators) == 0);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	parent_attr.pd = pd;
	parent = ibv_alloc_parent_domain(context, &parent_attr);
	CHECK(parent);
	CHECK(posix_memalign((void **)&pool, 4096, POOL) == 0);
	CHECK(!ibv_reg_mr(pd, (void *)16, 64, 0) && errno == EFAULT);
	mr = ibv_reg_mr(pd, pool, POOL, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr && mr->lkey);

	create_tx();
	create_rx(IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4 | IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP |
		  IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP);
	for (i = 0; i < QUEUES; i++)
		for (n = 0; n < 60; n++)
			post_rx(i, RX_BUFFER, mr->lkey);
	traffic();
	refusals();
	unmapped();

	/* Objects are destroyed before those that they use. */
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(ibv_destroy_rwq_ind_table(table) == EBUSY);
	CHECK(ibv_destroy_qp(rss_qp) == 0);
	CHECK(ibv_destroy_rwq_ind_table(table) == 0);
	for (i = 0; i < QUEUES; i++) {
		CHECK(ibv_destroy_wq(wqs[i]) == 0);
		CHECK(ibv_destroy_cq(rx[i].cq) == 0);
	}
	destroy_tx();
	CHECK(ibv_dealloc_pd(parent) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(allocated == 0);
	CHECK(ibv_close_device(context) == 0);
	printf("all good\n");
	return 0;
}
