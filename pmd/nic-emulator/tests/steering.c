/*
 * Flow rules of a ConnectX through libibverbs and libmlx5, built with the headers of the distribution. The program
 * tests matchers, all four kinds of packet reformat, header modification, counters, and errors of the kernel. The link
 * is a loop, so rules of both directions apply to each packet.
 */
#include "mlx5_queues.h"

enum { RECEIVERS = 3, MOST = 200 };

struct receiver {
    struct ibv_cq *cq;
    struct ibv_wq *wq;
    struct ibv_rwq_ind_table *table;
    struct ibv_qp *qp;
    struct mlx5dv_rwq queue;
    struct mlx5dv_cq completions;
    uint8_t *slots;
    unsigned next;
};

static struct receiver receivers[RECEIVERS];
static struct sender sender;

static void open_receiver(struct receiver *r, uint8_t *slots)
{
    r->slots = slots;
    r->cq = ibv_create_cq(context, ENTRIES - 1, NULL, NULL, 0);
    CHECK(r->cq);
    struct ibv_wq_init_attr wq_attr = {.wq_type = IBV_WQT_RQ, .max_wr = ENTRIES, .max_sge = 1, .pd = pd, .cq = r->cq};
    r->wq = ibv_create_wq(context, &wq_attr);
    CHECK(r->wq);
    struct ibv_wq_attr ready = {.attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY};
    CHECK(ibv_modify_wq(r->wq, &ready) == 0);
    struct ibv_rwq_ind_table_init_attr table_attr = {.log_ind_tbl_size = 0, .ind_tbl = &r->wq};
    r->table = ibv_create_rwq_ind_table(context, &table_attr);
    CHECK(r->table);
    uint8_t key[40] = {1};
    struct ibv_qp_init_attr_ex rss = {
        .qp_type = IBV_QPT_RAW_PACKET, .pd = pd, .rwq_ind_tbl = r->table,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
        .rx_hash_conf = {.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
                         .rx_hash_key_len = sizeof key, .rx_hash_key = key}};
    r->qp = ibv_create_qp_ex(context, &rss);
    CHECK(r->qp);
    struct mlx5dv_obj object = {.rwq = {r->wq, &r->queue}, .cq = {r->cq, &r->completions}};
    CHECK(mlx5dv_init_obj(&object, MLX5DV_OBJ_RWQ | MLX5DV_OBJ_CQ) == 0);
    for (unsigned i = 0; i < ENTRIES; i++)
        mlx5dv_set_data_seg((void *)((uint8_t *)r->queue.buf + i * r->queue.stride), SLOT, mr->lkey,
                            (uintptr_t)(slots + i * SLOT));
    __sync_synchronize();
    r->queue.dbrec[MLX5_RCV_DBR] = htobe32(ENTRIES);
}

static void close_receiver(struct receiver *r)
{
    CHECK(ibv_destroy_qp(r->qp) == 0 && ibv_destroy_rwq_ind_table(r->table) == 0);
    CHECK(ibv_destroy_wq(r->wq) == 0 && ibv_destroy_cq(r->cq) == 0);
}

static void send_frame(const uint8_t *frame, unsigned length)
{
    uint8_t *slot = buffers + sender.next % ENTRIES * SLOT;
    memcpy(slot, frame, length);
    post(&sender, slot, length, mr->lkey, NULL);
    CHECK(entry(&sender.completions, sender.seen++));
}

/* Returns the next packet of a receiver, and checks its length and tag. */
static const uint8_t *arrived(int at, unsigned length, unsigned tag)
{
    struct receiver *r = &receivers[at];
    volatile struct mlx5_cqe64 *cqe = entry(&r->completions, r->next);
    CHECK(cqe && cqe->op_own >> 4 == MLX5_CQE_RESP_SEND);
    if (be32toh(cqe->byte_cnt) != length || (be32toh(cqe->sop_drop_qpn) & 0xffffff) != tag) {
        printf("receiver %d: %u bytes, tag %#x\n", at, be32toh(cqe->byte_cnt), be32toh(cqe->sop_drop_qpn) & 0xffffff);
        CHECK(!"another packet was expected");
    }
    const uint8_t *slot = r->slots + r->next++ % ENTRIES * SLOT;
    r->queue.dbrec[MLX5_RCV_DBR] = htobe32((r->next + ENTRIES) & 0xffff);
    return slot;
}

/* Checks that a packet arrives unchanged. */
static void goes_to(int at, const uint8_t *frame, unsigned length, unsigned tag)
{
    send_frame(frame, length);
    CHECK(memcmp(arrived(at, length, tag), frame, length) == 0);
}

static uint16_t checksum(const uint8_t *bytes, unsigned length)
{
    uint32_t sum = 0;
    for (unsigned i = 0; i + 1 < length; i += 2)
        sum += bytes[i] << 8 | bytes[i + 1];
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

/* Builds a UDP packet to 198.18.0.`host` port `port`; returns its length. */
static unsigned udp(uint8_t *frame, unsigned host, unsigned port)
{
    static const uint8_t header[] = {2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0, 0x45, 0, 0, 86, 0, 7, 0x40, 0, 64, 17,
                                     0, 0, 198, 18, 0, 1, 198, 18, 0, 0, 0x30, 0x39, 0, 0, 0, 66, 0, 0};
    memcpy(frame, header, sizeof header);
    frame[33] = host;
    frame[36] = port >> 8;
    frame[37] = port;
    uint16_t sum = checksum(frame + 14, 20);
    frame[24] = sum >> 8;
    frame[25] = sum;
    for (unsigned at = sizeof header; at < 100; at++)
        frame[at] = (uint8_t)(at * 3 + host);
    return 100;
}

/* Match parameters: big-endian, offsets of mlx5_ifc.h. */
struct parameters {
    size_t size;
    uint8_t bytes[0x200];
};
static struct mlx5dv_flow_match_parameters *as(struct parameters *p)
{
    p->size = sizeof p->bytes;
    return (void *)p;
}
enum { IP_VERSION = 0x12, IP_PROTOCOL = 0x10, UDP_DPORT = 0x1e, DST_IPV4 = 0x3c, VNI = 0x54 };

static struct mlx5dv_flow_matcher *matcher(struct parameters *mask, int priority, int criteria, int egress)
{
    struct mlx5dv_flow_matcher_attr attr = {.type = IBV_FLOW_ATTR_NORMAL, .priority = priority,
                                            .match_criteria_enable = criteria, .match_mask = as(mask),
                                            .flags = egress ? IBV_FLOW_ATTR_FLAGS_EGRESS : 0};
    struct mlx5dv_flow_matcher *made = mlx5dv_create_flow_matcher(context, &attr);
    CHECK(made);
    return made;
}

static struct mlx5dv_flow_action_attr to(int at)
{
    return (struct mlx5dv_flow_action_attr){.type = MLX5DV_FLOW_ACTION_DEST_IBV_QP, .qp = receivers[at].qp};
}
static struct mlx5dv_flow_action_attr tagged(unsigned tag)
{
    return (struct mlx5dv_flow_action_attr){.type = MLX5DV_FLOW_ACTION_TAG, .tag_value = tag};
}
static struct mlx5dv_flow_action_attr by(struct ibv_flow_action *action)
{
    return (struct mlx5dv_flow_action_attr){.type = MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION, .action = action};
}
static const struct mlx5dv_flow_action_attr DROPPED = {.type = MLX5DV_FLOW_ACTION_DROP};
static const struct mlx5dv_flow_action_attr MISSED = {.type = MLX5DV_FLOW_ACTION_DEFAULT_MISS};

#define RULE(matcher, value, ...)                                                                                      \
    mlx5dv_create_flow(matcher, as(value),                                                                             \
                       sizeof((struct mlx5dv_flow_action_attr[]){__VA_ARGS__}) /                                       \
                           sizeof(struct mlx5dv_flow_action_attr),                                                     \
                       (struct mlx5dv_flow_action_attr[]){__VA_ARGS__})
#define REFUSED(call, error) CHECK(!(call) && errno == (error))

static struct parameters outer_mask = {
    .bytes = {[IP_VERSION] = 0x1e, [IP_PROTOCOL] = 0xff, [UDP_DPORT] = 0xff, [UDP_DPORT + 1] = 0xff}};
static struct parameters port_is(unsigned port)
{
    return (struct parameters){
        .bytes = {[IP_VERSION] = 4 << 1, [IP_PROTOCOL] = 17, [UDP_DPORT] = port >> 8, [UDP_DPORT + 1] = port & 0xff}};
}

static void matchers(void)
{
    uint8_t frame[MOST];
    struct parameters nine = port_is(9), ten = port_is(10), eleven = port_is(11), outside = port_is(12), any = {0};
    struct mlx5dv_flow_matcher *first = matcher(&outer_mask, 1, 1, 0), *second = matcher(&any, 2, 0, 0);
    struct ibv_flow *a = RULE(first, &nine, to(1), tagged(0xabcde)), *b = RULE(first, &ten, DROPPED);
    struct ibv_flow *c = RULE(first, &eleven, MISSED), *d = RULE(second, &any, to(2), tagged(7));
    CHECK(a && b && c && d);
    goes_to(1, frame, udp(frame, 2, 9), 0xabcde);
    goes_to(2, frame, udp(frame, 2, 12), 7);
    send_frame(frame, udp(frame, 2, 10));
    goes_to(0, frame, udp(frame, 2, 11), 0);
    goes_to(2, frame, udp(frame, 2, 13), 7);

    /* The same match is possible for another queue pair, but not with another tag or action. */
    struct ibv_flow *twice = RULE(first, &nine, to(2), tagged(0xabcde));
    CHECK(twice);
    send_frame(frame, udp(frame, 3, 9));
    CHECK(memcmp(arrived(1, 100, 0xabcde), frame, 100) == 0 && memcmp(arrived(2, 100, 0xabcde), frame, 100) == 0);
    REFUSED(RULE(first, &nine, to(1), tagged(1)), EEXIST);
    REFUSED(RULE(first, &nine, DROPPED), EEXIST);
    CHECK(ibv_destroy_flow(twice) == 0);

    outside.bytes[DST_IPV4] = 1;
    REFUSED(RULE(first, &outside, to(1)), EINVAL);
    REFUSED(RULE(first, &nine, to(1), tagged(1 << 24)), EINVAL);
    CHECK(mlx5dv_destroy_flow_matcher(first) == EBUSY);
    struct mlx5dv_flow_matcher *uncovered = matcher(&outer_mask, 1, 2, 0), *late = matcher(&outer_mask, 16, 1, 0);
    REFUSED(RULE(uncovered, &nine, to(1)), EINVAL);
    REFUSED(RULE(late, &nine, to(1)), ENOMEM);
    /* Reserved bits between the headers and the next part. */
    struct parameters reserved = {.bytes = {[0x18] = 1}};
    struct mlx5dv_flow_matcher *unknown = matcher(&reserved, 1, 1, 0);
    REFUSED(RULE(unknown, &any, to(1)), EINVAL);
    CHECK(mlx5dv_destroy_flow_matcher(uncovered) == 0 && mlx5dv_destroy_flow_matcher(late) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(unknown) == 0);
    CHECK(ibv_destroy_flow(a) == 0 && ibv_destroy_flow(b) == 0 && ibv_destroy_flow(c) == 0 && ibv_destroy_flow(d) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(first) == 0 && mlx5dv_destroy_flow_matcher(second) == 0);
}

struct rule {
    struct ibv_flow_attr attr;
    struct ibv_flow_spec_ipv4 ip;
    struct ibv_flow_spec_tcp_udp udp;
    struct ibv_flow_spec_counter_action count;
} __attribute__((packed, aligned(8)));

static struct rule verbs_rule(unsigned port, int flags)
{
    return (struct rule){
        .attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(struct rule), .num_of_specs = 2, .port = 1,
                 .flags = flags},
        .ip = {.type = IBV_FLOW_SPEC_IPV4, .size = sizeof(struct ibv_flow_spec_ipv4)},
        .udp = {.type = IBV_FLOW_SPEC_UDP, .size = sizeof(struct ibv_flow_spec_tcp_udp),
                .val.dst_port = htobe16(port), .mask.dst_port = 0xffff}};
}

static void verbs(void)
{
    uint8_t frame[MOST];
    /* Counters: packets at index 1, bytes at index 0. */
    struct ibv_counters_init_attr none = {0};
    struct ibv_counters *counters = ibv_create_counters(context, &none);
    CHECK(counters);
    struct ibv_counter_attach_attr packets = {.counter_desc = IBV_COUNTER_PACKETS, .index = 1};
    struct ibv_counter_attach_attr bytes = {.counter_desc = IBV_COUNTER_BYTES, .index = 0};
    CHECK(ibv_attach_counters_point_flow(counters, &packets, NULL) == 0);
    CHECK(ibv_attach_counters_point_flow(counters, &bytes, NULL) == 0);
    uint64_t values[2];
    CHECK(ibv_read_counters(counters, values, 2, 0) == EINVAL);
    struct rule rule = verbs_rule(20, 0);
    rule.attr.num_of_specs = 3;
    rule.count = (struct ibv_flow_spec_counter_action){
        .type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof rule.count, .counters = counters};
    struct ibv_flow *flow = ibv_create_flow(receivers[1].qp, &rule.attr);
    CHECK(flow);
    for (int i = 0; i < 3; i++)
        goes_to(1, frame, udp(frame, i, 20), 0);
    goes_to(0, frame, udp(frame, 0, 21), 0);
    CHECK(ibv_read_counters(counters, values, 2, 0) == 0 && values[0] == 300 && values[1] == 3);
    CHECK(ibv_read_counters(counters, values, 1, 0) == EINVAL);
    CHECK(ibv_destroy_counters(counters) == EBUSY);
    CHECK(ibv_destroy_flow(flow) == 0 && ibv_destroy_counters(counters) == 0);

    /* A rule with DONT_TRAP; then an egress rule that drops packets, and a sniffer rule. */
    struct rule copy = verbs_rule(30, IBV_FLOW_ATTR_FLAGS_DONT_TRAP), kept = verbs_rule(30, 0);
    kept.attr.priority = 3;
    struct ibv_flow *a = ibv_create_flow(receivers[1].qp, &copy.attr);
    struct ibv_flow *b = ibv_create_flow(receivers[2].qp, &kept.attr);
    CHECK(a && b);
    send_frame(frame, udp(frame, 2, 30));
    CHECK(memcmp(arrived(1, 100, 0), frame, 100) == 0 && memcmp(arrived(2, 100, 0), frame, 100) == 0);
    CHECK(ibv_destroy_flow(a) == 0 && ibv_destroy_flow(b) == 0);
    struct {
        struct rule rule;
        struct ibv_flow_spec_action_drop drop;
    } __attribute__((packed, aligned(8))) stop = {.rule = verbs_rule(40, IBV_FLOW_ATTR_FLAGS_EGRESS)};
    struct ibv_flow_spec_action_drop drop = {.type = IBV_FLOW_SPEC_ACTION_DROP, .size = sizeof drop};
    memcpy(&stop.rule.count, &drop, sizeof drop);
    stop.rule.attr.num_of_specs = 3;
    a = ibv_create_flow(receivers[0].qp, &stop.rule.attr);
    CHECK(a);
    send_frame(frame, udp(frame, 2, 40));
    goes_to(0, frame, udp(frame, 2, 41), 0);
    CHECK(ibv_destroy_flow(a) == 0);
    struct ibv_flow_attr everything = {.type = IBV_FLOW_ATTR_SNIFFER, .size = sizeof everything, .port = 1};
    a = ibv_create_flow(receivers[1].qp, &everything);
    CHECK(a);
    goes_to(0, frame, udp(frame, 2, 50), 0);
    /* One copy at egress, one at ingress. */
    CHECK(memcmp(arrived(1, 100, 0), frame, 100) == 0 && memcmp(arrived(1, 100, 0), frame, 100) == 0);
    CHECK(ibv_destroy_flow(a) == 0);

    struct rule wrong = verbs_rule(1, 0);
    wrong.attr.priority = 16;
    REFUSED(ibv_create_flow(receivers[0].qp, &wrong.attr), ENOMEM);
    wrong = verbs_rule(1, 0);
    wrong.attr.port = 2;
    REFUSED(ibv_create_flow(receivers[0].qp, &wrong.attr), EINVAL);
    wrong = verbs_rule(1, 1 << 3);
    REFUSED(ibv_create_flow(receivers[0].qp, &wrong.attr), EINVAL);
    wrong = verbs_rule(1, 0);
    wrong.ip.val.src_ip = 1;
    REFUSED(ibv_create_flow(receivers[0].qp, &wrong.attr), EINVAL);
    wrong = verbs_rule(1, 0);
    REFUSED(ibv_create_flow(sender.qp, &wrong.attr), EINVAL);
}

/* Outer headers as a program passes them; the device sets lengths and checksum. */
static const uint8_t VXLAN[50] = {2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 1, 1, 8, 0,
                                  0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2,
                                  0, 0, 0x12, 0xb5, 0, 0, 0, 0, 8, 0, 0, 0, 0x12, 0x34, 0x56, 0};
static const uint8_t GRE[38] = {2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 1, 1, 8, 0,
                                0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 47, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 0, 0, 8, 0};

static struct ibv_flow_action *reformat(const void *data, size_t size, int kind, int table)
{
    return mlx5dv_create_flow_action_packet_reformat(context, size, (void *)data, kind, table);
}

enum {
    OFF_L2 = MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2,
    ON_L2 = MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL,
    OFF_L3 = MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2,
    ON_L3 = MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL,
    RX = MLX5DV_FLOW_TABLE_TYPE_NIC_RX,
    TX = MLX5DV_FLOW_TABLE_TYPE_NIC_TX,
};

static void tunnels(void)
{
    uint8_t frame[MOST];
    struct parameters sixty = port_is(60), seventy = port_is(70);
    struct mlx5dv_flow_matcher *sent = matcher(&outer_mask, 0, 1, 1);

    /* Adds VXLAN headers, and checks the frame on the wire. */
    struct ibv_flow_action *on = reformat(VXLAN, sizeof VXLAN, ON_L2, TX), *off = reformat(NULL, 0, OFF_L2, RX);
    CHECK(on && off);
    struct ibv_flow *a = RULE(sent, &sixty, by(on));
    CHECK(a);
    send_frame(frame, udp(frame, 2, 60));
    const uint8_t *wire = arrived(0, 150, 0);
    CHECK(memcmp(wire, VXLAN, 16) == 0 && memcmp(wire + 26, VXLAN + 26, 8) == 0);
    CHECK(memcmp(wire + 42, VXLAN + 42, 8) == 0);
    CHECK(wire[16] == 0 && wire[17] == 136 && wire[38] == 0 && wire[39] == 116 && checksum(wire + 14, 20) == 0);
    CHECK(wire[34] >= 0xc0 && memcmp(wire + 50, frame, 100) == 0);
    goes_to(0, frame, udp(frame, 2, 61), 0);

    /* Removes them, with a match of the VNI. */
    struct parameters identifier = {
        .bytes = {[UDP_DPORT] = 0xff, [UDP_DPORT + 1] = 0xff, [VNI] = 0xff, [VNI + 1] = 0xff, [VNI + 2] = 0xff}};
    struct parameters is = {
        .bytes = {[UDP_DPORT] = 0x12, [UDP_DPORT + 1] = 0xb5, [VNI] = 0x12, [VNI + 1] = 0x34, [VNI + 2] = 0x56}};
    struct mlx5dv_flow_matcher *came = matcher(&identifier, 0, 3, 0);
    struct ibv_flow *b = RULE(came, &is, by(off), to(1), tagged(0x123456));
    CHECK(b);
    goes_to(1, frame, udp(frame, 2, 60), 0x123456);
    CHECK(ibv_destroy_flow(a) == 0 && ibv_destroy_flow(b) == 0);
    CHECK(ibv_destroy_flow_action(on) == 0 && ibv_destroy_flow_action(off) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(came) == 0);

    /* Replaces the Ethernet header by GRE, then GRE by a new Ethernet header without and with a VLAN tag. */
    uint8_t link[18] = {2, 0, 0, 0, 7, 7, 2, 0, 0, 0, 7, 8, 8, 0};
    on = reformat(GRE, sizeof GRE, ON_L3, TX);
    a = RULE(sent, &seventy, by(on));
    CHECK(on && a);
    send_frame(frame, udp(frame, 2, 70));
    wire = arrived(0, 124, 0);
    CHECK(wire[17] == 110 && checksum(wire + 14, 20) == 0 && memcmp(wire + 34, GRE + 34, 4) == 0);
    CHECK(memcmp(wire + 38, frame + 14, 86) == 0);
    struct parameters protocol = {.bytes = {[IP_PROTOCOL] = 0xff}}, gre = {.bytes = {[IP_PROTOCOL] = 47}};
    came = matcher(&protocol, 0, 1, 0);
    off = reformat(link, 14, OFF_L3, RX);
    b = RULE(came, &gre, by(off), to(1));
    CHECK(off && b);
    send_frame(frame, udp(frame, 2, 70));
    const uint8_t *got = arrived(1, 100, 0);
    CHECK(memcmp(got, link, 14) == 0 && memcmp(got + 14, frame + 14, 86) == 0);
    CHECK(ibv_destroy_flow(b) == 0 && ibv_destroy_flow_action(off) == 0);
    memcpy(link + 12, (uint8_t[]){0x81, 0, 0, 5, 8, 0}, 6);
    off = reformat(link, 18, OFF_L3, RX);
    b = RULE(came, &gre, by(off), to(1));
    CHECK(off && b);
    send_frame(frame, udp(frame, 2, 70));
    got = arrived(1, 104, 0);
    CHECK(memcmp(got, link, 18) == 0 && memcmp(got + 18, frame + 14, 86) == 0);
    CHECK(ibv_destroy_flow_action(off) == EBUSY);

    REFUSED(reformat(VXLAN, sizeof VXLAN, ON_L2, RX), EOPNOTSUPP);
    REFUSED(reformat(NULL, 0, OFF_L2, TX), EOPNOTSUPP);
    REFUSED(reformat(link, 14, OFF_L3, TX), EOPNOTSUPP);
    REFUSED(reformat(GRE, sizeof GRE, ON_L3, MLX5DV_FLOW_TABLE_TYPE_FDB), EOPNOTSUPP);
    REFUSED(reformat(link, 16, OFF_L3, RX), EINVAL);
    REFUSED(reformat(frame, 129, ON_L2, TX), EINVAL);
    REFUSED(reformat(NULL, 0, ON_L2, TX), ENOENT);
    REFUSED(RULE(came, &gre, by(on), to(1)), EINVAL);
    REFUSED(RULE(came, &gre, by(off), by(off), to(1)), EINVAL);
    REFUSED(RULE(sent, &sixty, to(1)), EINVAL);
    CHECK(ibv_destroy_flow(a) == 0 && ibv_destroy_flow(b) == 0);
    CHECK(ibv_destroy_flow_action(on) == 0 && ibv_destroy_flow_action(off) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(came) == 0 && mlx5dv_destroy_flow_matcher(sent) == 0);
}

static struct ibv_flow_action *modify(size_t count, const uint32_t *words, int table)
{
    uint32_t commands[128];
    for (size_t i = 0; i < 2 * count; i++)
        commands[i] = htobe32(words[i]);
    return mlx5dv_create_flow_action_modify_header(context, 8 * count, (uint64_t *)commands, table);
}

static void headers(void)
{
    uint8_t frame[MOST];
    struct parameters eighty = port_is(80);
    struct mlx5dv_flow_matcher *came = matcher(&outer_mask, 0, 1, 0);
    /* Decrements the TTL (a single command is passed inline); the packet has no UDP checksum. */
    struct ibv_flow_action *action = modify(1, (uint32_t[]){2u << 28 | 0x0a << 16 | 8, 0xff}, RX);
    struct ibv_flow *flow = RULE(came, &eighty, by(action), to(1));
    CHECK(action && flow);
    send_frame(frame, udp(frame, 2, 80));
    const uint8_t *got = arrived(1, 100, 0);
    CHECK(got[22] == 63 && checksum(got + 14, 20) == 0 && memcmp(got + 26, frame + 26, 74) == 0);
    CHECK(ibv_destroy_flow(flow) == 0 && ibv_destroy_flow_action(action) == 0);
    /* Sets the destination address, copies from it to the source address, and sets parts of the ports. */
    action = modify(5, (uint32_t[]){1u << 28 | 0x04 << 16, 0x02aabbcc, 1u << 28 | 0x05 << 16 | 16, 0xddee,
                                    3u << 28 | 0x04 << 16, 0x01 << 16,
                                    1u << 28 | 0x16 << 16, 0x0a000005, 1u << 28 | 0x0b << 16 | 4 << 8 | 8, 0xab}, RX);
    flow = RULE(came, &eighty, by(action), to(2), tagged(9));
    CHECK(action && flow);
    send_frame(frame, udp(frame, 2, 80));
    got = arrived(2, 100, 9);
    CHECK(memcmp(got, (uint8_t[]){2, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 2, 0xaa, 0xbb, 0xcc, 0, 9}, 12) == 0);
    CHECK(memcmp(got + 30, (uint8_t[]){10, 0, 0, 5, 0x3a, 0xb9}, 6) == 0 && checksum(got + 14, 20) == 0);
    REFUSED(RULE(matcher(&outer_mask, 0, 1, 1), &eighty, by(action)), EINVAL);
    REFUSED(modify(1, (uint32_t[]){1u << 28 | 0x0a << 16 | 9, 0}, RX), EINVAL);
    REFUSED(modify(1, (uint32_t[]){1u << 28 | 0xfff << 16, 0}, RX), EINVAL);
    REFUSED(modify(1, (uint32_t[]){7u << 28 | 0x0a << 16 | 8, 0}, RX), EINVAL);
    uint32_t many[66];
    for (int i = 0; i < 66; i += 2)
        many[i] = 1u << 28 | 0x16 << 16, many[i + 1] = i;
    REFUSED(modify(33, many, RX), EOPNOTSUPP);
    CHECK(ibv_destroy_flow(flow) == 0 && ibv_destroy_flow_action(action) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(came) == 0);
}

/* Tests flow counters, which are firmware objects. */
static void firmware(void)
{
    uint8_t frame[MOST];
    uint32_t alloc[4] = {htobe32(0x939 << 16)}, made[4];
    struct mlx5dv_devx_obj *counter = mlx5dv_devx_obj_create(context, alloc, sizeof alloc, made, sizeof made);
    CHECK(counter && (uint8_t)made[0] == 0);
    struct parameters ninety = port_is(90);
    struct mlx5dv_flow_matcher *came = matcher(&outer_mask, 0, 1, 0);
    struct mlx5dv_flow_action_attr count = {.type = MLX5DV_FLOW_ACTION_COUNTERS_DEVX, .obj = counter};
    struct ibv_flow *flow = RULE(came, &ninety, count, to(1));
    CHECK(flow);
    for (int i = 0; i < 5; i++)
        goes_to(1, frame, udp(frame, i, 90), 0);
    uint32_t query[8] = {htobe32(0x93b << 16), [7] = made[2]}, answer[8];
    CHECK(mlx5dv_devx_obj_query(counter, query, sizeof query, answer, sizeof answer) == 0);
    CHECK(be32toh(answer[5]) == 5 && be32toh(answer[7]) == 500);
    query[7] = htobe32(be32toh(made[2]) + 1);
    CHECK(mlx5dv_devx_obj_query(counter, query, sizeof query, answer, sizeof answer) != 0);
    uint32_t other[4] = {htobe32(0x500 << 16)};
    CHECK(!mlx5dv_devx_obj_create(context, other, sizeof other, made, sizeof made));
    CHECK(mlx5dv_devx_obj_destroy(counter) != 0);
    CHECK(ibv_destroy_flow(flow) == 0 && mlx5dv_devx_obj_destroy(counter) == 0);
    CHECK(mlx5dv_destroy_flow_matcher(came) == 0);
}

int main(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 1 && mlx5dv_is_supported(list[0]));
    struct mlx5dv_context_attr attr = {.flags = MLX5DV_CONTEXT_FLAGS_DEVX};
    context = mlx5dv_open_device(list[0], &attr);
    CHECK(context);
    pd = ibv_alloc_pd(context);
    size_t size = (1 + RECEIVERS) * ENTRIES * SLOT;
    buffers = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pd && buffers != MAP_FAILED);
    mr = ibv_reg_mr(pd, buffers, size, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    for (int i = 0; i < RECEIVERS; i++)
        open_receiver(&receivers[i], buffers + (1 + i) * ENTRIES * SLOT);
    sender = open_sender();
    /* Packets without a matching rule go to the first receiver. */
    struct ibv_flow_attr rest = {.type = IBV_FLOW_ATTR_ALL_DEFAULT, .size = sizeof rest, .port = 1};
    struct ibv_flow *flow = ibv_create_flow(receivers[0].qp, &rest);
    CHECK(flow);

    matchers();
    verbs();
    tunnels();
    headers();
    firmware();

    CHECK(ibv_destroy_flow(flow) == 0);
    for (int i = 0; i < RECEIVERS; i++)
        close_receiver(&receivers[i]);
    close_sender(&sender);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    puts("all good");
    return 0;
}
