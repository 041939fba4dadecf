/*
 * Reflects every received frame to its sender, until a frame with EtherType 0x88b6 arrives. Prints "ready" when the
 * queues are ready.
 */
#include <endian.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <infiniband/manadv.h>
#include <infiniband/verbs.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #what); \
			exit(1); \
		} \
	} while (0)
#define N 128
#define BUFFER 9216

static void *allocate(size_t size, void *data)
{
	void *memory = NULL;
	(void)data;
	CHECK(posix_memalign(&memory, 4096, size) == 0);
	return memset(memory, 0, size);
}

static void release(void *memory, void *data)
{
	(void)data;
	free(memory);
}

int main(void)
{
	struct ibv_parent_domain_init_attr parent_attr = {
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, .pd_context = (void *)1 };
	struct manadv_ctx_allocators allocators = { allocate, release, NULL };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = N, .max_send_sge = 1, .max_recv_wr = 1, .max_recv_sge = 1 } };
	static uint8_t key[40] = { 1, 2, 3, 4 };
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(devices[0]);
	struct ibv_pd *pd, *parent;
	struct ibv_cq *tx_cq, *rx_cq;
	struct ibv_wq *wq;
	struct manadv_qp q;
	struct manadv_cq tc, rc;
	struct manadv_rwq w;
	struct manadv_obj object;
	uint8_t *pool = allocate(N * BUFFER, NULL);
	struct ibv_mr *mr;
	uint64_t taken, done, sent = 0, posted;
	volatile uint64_t *page;

	CHECK(context && manadv_set_context_attr(context, MANADV_CTX_ATTR_BUF_ALLOCATORS, &allocators) == 0);
	pd = ibv_alloc_pd(context);
	parent_attr.pd = pd;
	parent = ibv_alloc_parent_domain(context, &parent_attr);
	mr = ibv_reg_mr(pd, pool, N * BUFFER, IBV_ACCESS_LOCAL_WRITE);
	tx_cq = ibv_create_cq(context, N, NULL, NULL, 0);
	rx_cq = ibv_create_cq(context, N, NULL, NULL, 0);
	attr.send_cq = attr.recv_cq = tx_cq;
	object.qp.in = ibv_create_qp(parent, &attr);
	struct ibv_wq_init_attr wq_attr = { .wq_type = IBV_WQT_RQ, .max_wr = N, .max_sge = 1, .pd = pd, .cq = rx_cq };
	wq = ibv_create_wq(context, &wq_attr);
	struct ibv_rwq_ind_table_init_attr table = { .ind_tbl = &wq };
	struct ibv_qp_init_attr_ex rss = {
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE,
		.qp_type = IBV_QPT_RAW_PACKET, .pd = parent, .rwq_ind_tbl = ibv_create_rwq_ind_table(context, &table),
		.rx_hash_conf = { IBV_RX_HASH_FUNC_TOEPLITZ, 40, key, 0xff } };
	CHECK(object.qp.in && wq && ibv_create_qp_ex(context, &rss));
	object.qp.out = &q;
	object.cq.in = tx_cq;
	object.cq.out = &tc;
	object.rwq.in = wq;
	object.rwq.out = &w;
	CHECK(manadv_init_obj(&object, MANADV_OBJ_QP | MANADV_OBJ_CQ | MANADV_OBJ_RWQ) == 0);
	object.cq.in = rx_cq;
	object.cq.out = &rc;
	CHECK(manadv_init_obj(&object, MANADV_OBJ_CQ) == 0);
	page = q.db_page;
	for (posted = 0; posted < N; posted++) {
		uint32_t *wqe = (uint32_t *)((char *)w.buf + posted % (w.size / 32) * 32);
		*(uint64_t *)(wqe + 4) = (uintptr_t)(pool + posted % N * BUFFER);
		wqe[6] = mr->lkey;
		wqe[7] = BUFFER;
		__atomic_store_n(&wqe[1], 1 | 2 << 8, __ATOMIC_RELEASE);
	}
	page[0x400 / 8] = posted * 32 << 32 | w.wq_id;
	printf("ready\n");
	fflush(stdout);
	taken = done = N;
	for (;;) {
		uint32_t *entry = (uint32_t *)((char *)rc.buf + taken % N * 64), *wqe, *tail, length, units, oob;
		uint8_t *frame = pool + (taken - N) % N * BUFFER, mac[6];
		bool vlan;
		if (__atomic_load_n(&entry[15], __ATOMIC_ACQUIRE) >> 29 != (taken / N & 7)) {
			sched_yield();
			continue;
		}
		taken++;
		length = entry[2] & 0xffff;
		vlan = entry[1] >> 12 & 1;
		CHECK((entry[0] & 0x3f) == 1 && length >= 14 && length <= BUFFER);
		if (frame[12] == 0x88 && frame[13] == 0xb6)
			return 0;
		memcpy(mac, frame, 6);
		memcpy(frame, frame + 6, 6);
		memcpy(frame + 6, mac, 6);
		/* The VLAN tag is inserted again. */
		oob = vlan ? 24 : 8;
		units = (8 + oob + 16 + 31) / 32;
		wqe = (uint32_t *)((char *)q.sq_buf + sent % (q.sq_size / 32) * 32);
		tail = (uint32_t *)((char *)q.sq_buf + (sent * 32 + 8 + oob) % q.sq_size);
		*(uint64_t *)tail = (uintptr_t)frame;
		tail[2] = mr->lkey;
		tail[3] = length;
		wqe[2] = (vlan ? 1 : 0) | tc.cq_id << 8;
		wqe[3] = (q.sq_id >> 10) << 10 | q.tx_vp_offset << 24;
		if (vlan) {
			wqe[4] = 1 << 3 | (entry[1] & 0xfff) << 20;
			wqe[5] = wqe[6] = wqe[7] = 0;
		}
		__atomic_store_n(&wqe[1], 1 | oob / 4 << 8, __ATOMIC_RELEASE);
		sent += units;
		page[0] = sent * 32 << 32 | q.sq_id;
		entry = (uint32_t *)((char *)tc.buf + done % N * 64);
		while (__atomic_load_n(&entry[15], __ATOMIC_ACQUIRE) >> 29 != (done / N & 7))
			sched_yield();
		CHECK((entry[0] & 0x3f) == 32);
		done++;
		wqe = (uint32_t *)((char *)w.buf + posted % (w.size / 32) * 32);
		*(uint64_t *)(wqe + 4) = (uintptr_t)frame;
		wqe[6] = mr->lkey;
		wqe[7] = BUFFER;
		__atomic_store_n(&wqe[1], 1 | 2 << 8, __ATOMIC_RELEASE);
		posted++;
		page[0x400 / 8] = posted * 32 << 32 | w.wq_id;
	}
}
