// One step of a Llama-shaped decoder on CPU: all scheduled tokens through all layers in one call.
//
// Every token-wise operator runs on the flat rows of all sequences, and only attention is split per sequence (selective
// batching, Orca, OSDI'22, section 3.2). The residual stream is float32 in every mode.
#include <cmath>
#include <functional>
#include <numeric>

#include "attention.h"
#include "draw.h"

using namespace orca;

extern "C" {

// The fields of these three are those of ctypes structures in decoder.py, in that order.
struct OrcaLayer {
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
  Linear qkv, output, gate_up, down;                              // gate_up: panels of 16 gate and 16 up columns
  void *keys, *values;                                            // Cache
};

struct OrcaModel {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, block_size;
  int64_t format;  // 0: float32, 1: bfloat16, 2: int8 weights with bfloat16 KV
  int64_t wide;    // bfloat16 is multiplied as floats
  float norm_eps, attention_scale;  // the scale is for powers of two
  const OrcaLayer* layers;
  const float* final_norm;
  const void* embedding;          // [vocabulary, hidden] in the KV's type
  const float *cosines, *sines;   // [positions, head_dim / 2]
  Linear head;
  int64_t vocabulary;             // columns of head that are tokens
};

struct OrcaStep {
  const int32_t* tokens;  // [rows]
  int64_t rows;
  const Span* spans;
  int64_t num_spans;
  const int32_t* tables;  // block ids, all sequences'
  const int32_t* wanted;  // [num_wanted] rows whose logits are wanted
  int64_t num_wanted;
  float* logits;          // [num_wanted, head.columns], or null
  const Draw* draws;      // [num_wanted], or null if all take the largest
  int32_t* chosen;        // [num_wanted] tokens; -1 where the logits are not all numbers
  float* states;          // [num_wanted, hidden] last hidden states, or null
};
}

namespace {

ORCA_INLINE void rms_norm(const float* x, const float* weight, float* out, long count, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < count; i += LANES) {
    const __m512 v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / (float)count + eps));
  for (long i = 0; i < count; i += LANES) {
    const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
    _mm512_storeu_ps(out + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
  }
}

// The largest of the logits that one thread has seen of a row, per lane; the first of equals.
struct Best {
  alignas(64) float value[LANES];
  alignas(64) int32_t token[LANES];
  uint32_t numbers;  // zero once a logit was none

  void clear() {
    _mm512_store_ps(value, _mm512_set1_ps(-INFINITY));
    _mm512_store_si512(token, _mm512_set1_epi32(INT32_MAX));
    numbers = 1;
  }
  ORCA_INLINE void see(__m512 logits, long first, __mmask16 valid) {
    const __m512 before = _mm512_load_ps(value);
    const __m512i lanes = _mm512_add_epi32(_mm512_set1_epi32((int)first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 larger = _mm512_mask_cmp_ps_mask(valid, logits, before, _CMP_GT_OQ);
    if (larger) {
      _mm512_store_ps(value, _mm512_mask_mov_ps(before, larger, logits));
      _mm512_store_si512(token, _mm512_mask_mov_epi32(_mm512_load_si512(token), larger, lanes));
    }
    if (_mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q)) numbers = 0;
  }
};

template <class T>
ORCA_INLINE void convert(const float* from, typename T::Elem* to, long count) {
  for (long i = 0; i < count; i += LANES) T::store(to + i, _mm512_loadu_ps(from + i));
}

class Decoder {
 public:
  Decoder(const OrcaModel& model, int threads) : m(model), team(threads) {}
  virtual ~Decoder() = default;
  virtual void step(const OrcaStep& step) = 0;
  virtual void begin(const OrcaStep& step) = 0;
  virtual void choose(const OrcaStep& step) = 0;
  virtual void products(long rows, long wanted) = 0;

 protected:
  const OrcaModel m;
  Team team;
};

// W: format of the linear layers; A: of keys, values, queries and attention weights.
template <class W, class A>
class DecoderOf final : public Decoder {
  static constexpr bool QUANTISED = std::is_same_v<W, I8>;

 public:
  DecoderOf(const OrcaModel& model, int threads) : Decoder(model, threads), ahead(threads), scratch(threads), row_of(threads) {}
  ~DecoderOf() override { team.begin(0); }

  void step(const OrcaStep& s) override {
    run(s, [this, s](Team::Member& member) {
      layers(member, s);
      logits(member, s);
    });
  }

  void begin(const OrcaStep& s) override {
    run(s, [this, s](Team::Member& member) { layers(member, s); });
  }

  void choose(const OrcaStep& s) override {
    team.begin(PHASES);
    team.run([this, s](Team::Member& member) { logits(member, s); });
  }

  // Only the matrix products of a step of so many rows, on whatever is in the buffers: what a step is measured against.
  void products(long rows, long wanted) override {
    team.begin(m.num_layers * PHASES + PHASES);
    reserve(rows, wanted);
    team.run([this, rows, wanted](Team::Member& member) {
      Ahead& own = ahead[member.index];
      own.clear();
      alignas(64) float sink[PANEL];
      const auto drop = [&](long, long, __m512 a, __m512 b) {
        _mm512_store_ps(sink, a);
        _mm512_store_ps(sink + LANES, b);
        asm volatile("" ::"r"(sink) : "memory");
      };
      for (long i = 0; i < m.num_layers; ++i) {
        const OrcaLayer& l = m.layers[i];
        apply<W>(member, l.qkv, normed.rows(m.hidden), 0, rows, own, drop);
        apply<W>(member, l.output, attended.rows(query_size()), 0, rows, own, drop);
        apply<W>(member, l.gate_up, normed.rows(m.hidden), 0, rows, own, drop);
        apply<W>(member, l.down, gated.rows(m.intermediate), 0, rows, own, drop);
      }
      apply<W>(member, m.head, normed.rows(m.hidden), 0, wanted, own, drop);
    });
  }

 private:
  static constexpr size_t PHASES = 10;  // of a layer, at most
  static constexpr long SHARED_ROWS = 32, PART_ROWS = 128;  // of a thread

  struct Piece {
    int32_t span, offset, count;
  };

  // Rows that go through the token-wise phases together, and their pieces.
  struct Part {
    long begin, end, first_piece, last_piece;
  };

  long query_size() const { return m.heads * m.head_dim; }
  long kv_size() const { return m.kv_heads * m.head_dim; }

  // What a product reads, row by row.
  struct Input {
    std::vector<typename W::Row::Elem> data;
    std::vector<float> scale;  // int8 only

    void reserve(long rows, long inner) {
      grow(data, rows * inner);
      if constexpr (QUANTISED) grow(scale, rows * (inner / W::GROUP));
    }
    Rows<W> rows(long inner) { return {data.data(), scale.data(), inner}; }
    void set(long row, const float* value, long inner) {
      if constexpr (QUANTISED) {
        quantise(value, &data[row * inner], &scale[row * (inner / W::GROUP)], inner);
      } else {
        convert<typename W::Row>(value, &data[row * inner], inner);
      }
    }
  };

  void reserve(long rows, long wanted, bool draws = false) {
    grow(x, rows * m.hidden);
    grow(projected, rows * m.layers[0].qkv.columns);
    normed.reserve(std::max(rows, wanted), m.hidden);
    attended.reserve(rows, query_size());
    gated.reserve(rows, m.intermediate);
    if constexpr (QUANTISED) {
      grow(wide_attended, rows * query_size());
      grow(wide_gated, rows * m.intermediate);
    }
    grow(queries, rows * query_size());
    grow(best, wanted * team.size());
    for (auto& one : row_of) grow(one, m.hidden);
    if (draws) grow(held, wanted * m.head.columns);
  }

  template <class E>
  static void grow(std::vector<E>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }

  // What all threads read: pieces of 16 positions to be written, tiles to be attended, longest first.
  void plan(const OrcaStep& s) {
    reserve(s.rows, s.num_wanted, s.draws != nullptr);
    pieces.clear();
    tiles.clear();
    for (long i = 0; i < s.num_wanted * team.size(); ++i) best[i].clear();
    long longest = 0;
    const long shared = m.heads / m.kv_heads;
    for (int32_t i = 0; i < s.num_spans; ++i) {
      const Span& span = s.spans[i];
      longest = std::max<long>(longest, span.context);
      const int32_t begin = span.context - span.length;
      for (int32_t p = begin; p < span.context;) {
        const int32_t end = std::min(span.context, p / LANES * LANES + LANES);
        pieces.push_back({i, p - begin, end - p});
        p = end;
      }
      const int32_t pairs = span.length * (int32_t)shared;
      for (int32_t first = 0; first < pairs; first += MAX_ROWS) {
        const int32_t count = std::min<int32_t>(MAX_ROWS, pairs - first);
        const int32_t last = begin + (first + count - 1) / (int32_t)shared;
        for (int32_t head = 0; head < m.kv_heads; ++head) tiles.push_back({i, head, first, count, last / LANES + 1});
      }
    }
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
      return (long)a.groups * a.count > (long)b.groups * b.count;
    });
    plan_parts(s.rows);
    plan_ahead(s);
    for (auto& one : scratch) one.reserve((longest + LANES - 1) / LANES * LANES, m.head_dim);
  }

  // Few rows go through a layer's products together, the panels of weights shared out. Of many each thread takes parts
  // through by itself: what it writes it reads again from its own cache, and nobody waits for anybody but at attention.
  void plan_parts(long rows) {
    parts.clear();
    const long threads = team.size(), each = (rows + threads * PART_ROWS - 1) / (threads * PART_ROWS);
    const long count = threads > 1 && rows >= SHARED_ROWS * threads ? threads * each : 1;
    Part part{0, 0, 0, 0};
    for (const Piece& piece : pieces) {
      part.end += piece.count;
      ++part.last_piece;
      if (part.end * count >= rows * (long)(parts.size() + 1)) {
        parts.push_back(part);
        part = {part.end, part.end, part.last_piece, part.last_piece};
      }
    }
  }

  // What attention reads of a layer, in the order in which it does, in pieces for Ahead; and how many of them are due
  // with each of the products' pieces.
  void plan_ahead(const OrcaStep& s) {
    constexpr size_t piece = 64 * AHEAD_LINES;
    const Cache<A> cache{nullptr, nullptr, m.kv_heads, m.head_dim, m.block_size};
    const size_t size = m.head_dim * LANES * sizeof(typename A::Kept::Elem);
    to_come.clear();
    if (on_intel) return;  // there the products lose more by it than attention wins
    for (const Tile& tile : tiles) {
      if (tile.first > 0) continue;  // the sequence's first tile fetches for all
      const int32_t* table = s.tables + s.spans[tile.span].table;
      for (long g = 0; g < tile.groups; ++g) {
        const size_t begin = cache.group(table, g * LANES, tile.head) * sizeof(typename A::Kept::Elem);
        for (size_t at = 0; at < size; at += piece) to_come.push_back(begin + at);
      }
    }
    const long chunks = chunks_of(s.rows), rows = (s.rows + chunks - 1) / chunks;
    const long blocks = (rows + most_rows<W>() - 1) / most_rows<W>();
    long calls = 0;
    const OrcaLayer& l = m.layers[0];
    for (const Linear* linear : {&l.qkv, &l.output, &l.gate_up, &l.down})
      calls += linear->columns / PANEL * (linear->inner / W::STEP / AHEAD_LINES);
    calls *= chunks * (blocks - 1);  // all blocks of rows but a panel's first
    if (calls == 0) to_come.clear();
    rate = std::clamp(1.2f * 2 * (float)to_come.size() / (float)calls, 0.25f, 1.0f);
  }

  void run(const OrcaStep& s, Team::Job job) {
    team.begin(m.num_layers * PHASES + PHASES);
    plan(s);
    team.run(std::move(job));
  }

  void layers(Team::Member& member, const OrcaStep& s) {
    embed(member, s);
    for (long i = 0; i < m.num_layers; ++i) layer(member, s, i);
  }

  void embed(Team::Member& member, const OrcaStep& s) {
    member.each(s.rows, [&](long row) {
      const auto* from = (const typename A::Kept::Elem*)m.embedding + s.tokens[row] * m.hidden;
      for (long i = 0; i < m.hidden; i += LANES) _mm512_storeu_ps(&x[row * m.hidden + i], A::Kept::load(from + i));
    });
  }

  void layer(Team::Member& member, const OrcaStep& s, long index) {
    const OrcaLayer& l = m.layers[index];
    const Cache<A> cache{(typename A::Kept::Elem*)l.keys, (typename A::Kept::Elem*)l.values, m.kv_heads, m.head_dim, m.block_size};
    if (index == 0) ahead[member.index].clear();
    each_part(member, [&](auto& crew, const Part& part) { before_attention(crew, s, l, cache, part); });
    member.each_with_next(tiles.size(), [&](long i, long next) {
      attend_tile(s, cache, tiles[i], tiles[next < (long)tiles.size() ? next : i], scratch[member.index]);
    });
    if (index + 1 < m.num_layers)
      ahead[member.index].aim((&l)[1].keys, (&l)[1].values, to_come, member.index, team.size(), rate);
    each_part(member, [&](auto& crew, const Part& part) { after_attention(crew, l, part); });
  }

  template <class Work>
  void each_part(Team::Member& member, const Work& work) {
    if (parts.size() == 1) return work(member, parts[0]);
    member.each(parts.size(), [&](long i) {
      Team::Alone alone{member.index};
      work(alone, parts[i]);
    });
  }

  template <class Crew>
  void before_attention(Crew& crew, const OrcaStep& s, const OrcaLayer& l, const Cache<A>& cache, const Part& part) {
    normalise(crew, part, l.attention_norm);
    const long width = l.qkv.columns;
    Ahead& own = ahead[crew.index];
    apply<W>(crew, l.qkv, normed.rows(m.hidden), part.begin, part.end, own, [&](long row, long panel, __m512 a, __m512 b) {
      float* to = &projected[row * width + panel * PANEL];
      _mm512_storeu_ps(to, a);
      _mm512_storeu_ps(to + LANES, b);
    });
    crew.each(part.last_piece - part.first_piece, [&](long i) { rotate_and_remember(s, l, cache, pieces[part.first_piece + i]); });
  }

  template <class Crew>
  void after_attention(Crew& crew, const OrcaLayer& l, const Part& part) {
    const long hidden = m.hidden, inner = m.intermediate;
    Ahead& own = ahead[crew.index];
    const auto add = [&](long row, long panel, __m512 a, __m512 b) {
      float* to = &x[row * hidden + panel * PANEL];
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), a));
      _mm512_storeu_ps(to + LANES, _mm512_add_ps(_mm512_loadu_ps(to + LANES), b));
    };
    narrow(crew, part, wide_attended, attended, query_size());
    apply<W>(crew, l.output, attended.rows(query_size()), part.begin, part.end, own, add);
    normalise(crew, part, l.mlp_norm);
    apply<W>(crew, l.gate_up, normed.rows(hidden), part.begin, part.end, own, [&](long row, long panel, __m512 gate, __m512 up) {
      const __m512 value = _mm512_mul_ps(silu512(gate), up);
      if constexpr (QUANTISED) {
        _mm512_storeu_ps(&wide_gated[row * inner + panel * LANES], value);
      } else {
        W::Row::store(&gated.data[row * inner + panel * LANES], value);
      }
    });
    narrow(crew, part, wide_gated, gated, inner);
    apply<W>(crew, l.down, gated.rows(inner), part.begin, part.end, own, add);
  }

  template <class Crew>
  void normalise(Crew& crew, const Part& part, const float* weight) {
    crew.each(part.end - part.begin, [&](long i) {
      const long row = part.begin + i;
      prepare(crew.index, &x[row * m.hidden], weight, row);
    });
  }

  // The normalised row as a product's input.
  void prepare(int index, const float* from, const float* weight, long row) {
    float* value = row_of[index].data();
    rms_norm(from, weight, value, m.hidden, m.norm_eps);
    normed.set(row, value, m.hidden);
  }

  // int8 only: rows that were made piece by piece can be scaled only when they are whole.
  template <class Crew>
  void narrow(Crew& crew, const Part& part, const std::vector<float>& wide, Input& to, long inner) {
    if constexpr (QUANTISED)
      crew.each(part.end - part.begin, [&](long i) { to.set(part.begin + i, &wide[(part.begin + i) * inner], inner); });
  }

  // Rotary positions in the halves' order, with the model's own table; norms of heads where the family has them.
  void rotate(float* head, const float* norm, long position) const {
    const long half = m.head_dim / 2;
    if (norm) rms_norm(head, norm, head, m.head_dim, m.norm_eps);
    const float *cosine = m.cosines + position * half, *sine = m.sines + position * half;
    for (long i = 0; i < half; i += LANES) {
      const __m512 a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
      const __m512 c = _mm512_loadu_ps(cosine + i), d = _mm512_loadu_ps(sine + i);
      _mm512_storeu_ps(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, d)));
      _mm512_storeu_ps(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, d)));
    }
  }

  void rotate_and_remember(const OrcaStep& s, const OrcaLayer& l, const Cache<A>& cache, const Piece& piece) {
    const Span& span = s.spans[piece.span];
    const long dim = m.head_dim;
    typename A::Kept::Elem key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
    const __m512 scale = _mm512_set1_ps(m.attention_scale);
    for (long i = piece.offset; i < piece.offset + piece.count; ++i) {
      const long row = span.start + i, position = span.context - span.length + i;
      float* heads = &projected[row * l.qkv.columns];
      typename A::Row::Elem* query = &queries[row * query_size()];
      for (long h = 0; h < m.heads; ++h) {
        rotate(heads + h * dim, l.query_norm, position);
        for (long d = 0; d < dim; d += LANES)
          A::Row::store(query + h * dim + d, _mm512_mul_ps(scale, _mm512_loadu_ps(heads + h * dim + d)));
      }
      float *keys = heads + query_size(), *values = keys + kv_size();
      for (long h = 0; h < m.kv_heads; ++h) {
        rotate(keys + h * dim, l.key_norm, position);
        convert<typename A::Kept>(keys + h * dim, key, dim);
        convert<typename A::Kept>(values + h * dim, value, dim);
        remember(cache, s.tables + span.table, position, h, key, value);
      }
    }
  }

  void attend_tile(const OrcaStep& s, const Cache<A>& cache, const Tile& tile, const Tile& next, Scratch<A>& own) {
    Upcoming<A> upcoming;
    upcoming.aim(cache, s.tables + s.spans[next.span].table, next.head, next.groups);
    const Span& span = s.spans[tile.span];
    const long shared = m.heads / m.kv_heads, dim = m.head_dim;
    long visible[MAX_ROWS], place[MAX_ROWS];
    for (int r = 0; r < tile.count; ++r) {
      const long offset = (tile.first + r) / shared, head = tile.head * shared + (tile.first + r) % shared;
      visible[r] = span.context - span.length + offset + 1;
      place[r] = (span.start + offset) * query_size() + head * dim;
      memcpy(own.query() + r * dim, &queries[place[r]], dim * sizeof(typename A::Row::Elem));
    }
    with_rows(tile.count, [&](auto n) {
      attend<A, n.value>(cache, s.tables + span.table, tile.head, tile.groups, visible, own, upcoming,
                         [&](int r, long d, __m512 a, __m512 b) {
                           if constexpr (QUANTISED) {
                             _mm512_storeu_ps(&wide_attended[place[r] + d], a);
                             _mm512_storeu_ps(&wide_attended[place[r] + d + LANES], b);
                           } else {
                             W::Row::store(&attended.data[place[r] + d], a);
                             W::Row::store(&attended.data[place[r] + d + LANES], b);
                           }
                         });
    });
  }

  void logits(Team::Member& member, const OrcaStep& s) {
    member.each(s.num_wanted, [&](long i) { prepare(member.index, &x[s.wanted[i] * m.hidden], m.final_norm, i); });
    if (s.states)
      member.each(s.num_wanted, [&](long i) {
        rms_norm(&x[s.wanted[i] * m.hidden], m.final_norm, s.states + i * m.hidden, m.hidden, m.norm_eps);
      });
    Best* own = &best[member.index * s.num_wanted];
    float* const kept = s.logits ? s.logits : s.draws ? held.data() : nullptr;
    apply<W>(member, m.head, normed.rows(m.hidden), 0, s.num_wanted, ahead[member.index], [&](long row, long panel, __m512 a, __m512 b) {
      const long first = panel * PANEL;
      const uint32_t valid = allowed_of(s.draws ? s.draws[row].allowed : nullptr, first, m.vocabulary);
      own[row].see(a, first, (__mmask16)valid);
      own[row].see(b, first + LANES, (__mmask16)(valid >> LANES));
      if (kept == nullptr) return;
      float* to = kept + row * m.head.columns + first;
      _mm512_storeu_ps(to, a);
      _mm512_storeu_ps(to + LANES, b);
    });
    member.each(s.num_wanted, [&](long row) {
      float most = -INFINITY;
      s.chosen[row] = best_of(row, s.num_wanted, most);
      if (s.draws && s.draws[row].sharpness > 0 && s.chosen[row] >= 0)
        s.chosen[row] = draw_token(kept + row * m.head.columns, m.vocabulary, most, s.draws[row]);
    });
  }

  int32_t best_of(long row, long rows, float& value) const {
    int32_t token = INT32_MAX;
    for (int t = 0; t < team.size(); ++t) {
      const Best& one = best[t * rows + row];
      if (!one.numbers) return -1;
      for (int i = 0; i < LANES; ++i) {
        if (one.value[i] < value || (one.value[i] == value && one.token[i] >= token)) continue;
        value = one.value[i];
        token = one.token[i];
      }
    }
    return token == INT32_MAX ? -1 : token;  // all of them minus infinity
  }

  static constexpr long MAX_HEAD_DIM = 256;
  std::vector<float> x, projected, wide_attended, wide_gated, held;
  Input normed, attended, gated;
  std::vector<typename A::Row::Elem> queries;
  std::vector<Piece> pieces;
  std::vector<Part> parts;
  std::vector<Tile> tiles;
  std::vector<size_t> to_come;
  float rate = 0;
  std::vector<Best> best;
  // Of each thread.
  std::vector<Ahead> ahead;
  std::vector<Scratch<A>> scratch;
  std::vector<std::vector<float>> row_of;
};

}  // namespace

extern "C" {

// Whether products of floats are faster here than those of bfloat16: Intel's processors take two cycles for one of 32
// pairs, AMD's one or less, and either a half for one of 16 floats.
int orca_wide_is_faster() { return on_intel; }

// The model and everything it points to must outlive the decoder. Null if the format is unknown.
void* orca_decoder_new(const OrcaModel* model, int threads) {
  switch (model->format) {
    case 0: return new DecoderOf<F32, F32>(*model, threads);
    case 1: return model->wide ? (Decoder*)new DecoderOf<WideBF16, WideBF16>(*model, threads) : new DecoderOf<BF16, BF16>(*model, threads);
    case 2: return model->wide ? (Decoder*)new DecoderOf<I8, WideBF16>(*model, threads) : new DecoderOf<I8, BF16>(*model, threads);
    default: return nullptr;
  }
}

void orca_decoder_step(void* decoder, const OrcaStep* step) { ((Decoder*)decoder)->step(*step); }

// The same in two: what `draws` say is looked at in the second only.
void orca_decoder_begin(void* decoder, const OrcaStep* step) { ((Decoder*)decoder)->begin(*step); }

void orca_decoder_choose(void* decoder, const OrcaStep* step) { ((Decoder*)decoder)->choose(*step); }

void orca_decoder_products(void* decoder, long rows, long wanted) { ((Decoder*)decoder)->products(rows, wanted); }

void orca_decoder_delete(void* decoder) { delete (Decoder*)decoder; }
}
