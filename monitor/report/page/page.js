'use strict'
// Shows the model of a report. Text from the run goes into text nodes only.

const $ = id => document.getElementById(id)
const NAMES = { good: ['good', '✓ good'], bad: ['bad', '✗ bad'], 'not looked at': ['unseen', '○ not looked at'] }
const began = performance.now()
const drawn = []

async function unpacked(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length)
  for (let place = 0; place < packed.length; place++) bytes[place] = packed.charCodeAt(place)
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer()
}

class Report {
  constructor(data, buffer, colours = coloursOf) {
    this.data = data
    this.bytes = new Uint8Array(buffer)
    this.buffer = buffer
    this.colours = colours(data.codes)
    this.columns = data.first.length
  }

  cells(offset, count) { return this.bytes.subarray(offset, offset + count) }

  stepName(column) {
    const first = this.data.first[column], last = this.data.last[column]
    return first === last ? String(first) : `${first} to ${last}`
  }

  // The columns of round steps, or of multiples of the steps between two columns, at most as many as there is room for.
  ticks(count) {
    const { first, last } = this.data, unit = this.columns > 1 ? first[1] - first[0] : 1
    let every = unit
    for (const times of [2, 2.5, 2, 2, 2.5, 2, 2, 2.5, 2, 2, 2.5, 2]) if ((last[this.columns - 1] - first[0]) / every > count - 1) every *= times
    const passed = (column, step) => Math.floor(column < 0 ? (first[0] - 1) / every : step / every)
    return first.flatMap((_, column) => (passed(column, last[column]) > passed(column - 1, last[column - 1]) ? [column] : []))
  }

  meaning(code) {
    const { warmUp, least, partly, most, differs, infinite, nan } = this.data.codes
    if (code === 0) return 'not recorded'
    if (code === warmUp) return 'its history begins'
    if (code === partly) return 'not recorded on some ranks'
    if (code === differs) return 'differs between ranks'
    if (code === infinite) return 'infinite'
    if (code === nan) return 'NaN'
    const level = code - least - (code > partly ? 1 : 0)
    return level >= most ? `${most} standard deviations or more` : `${level} to ${level + 1} standard deviations`
  }

  // --- The top of the page.

  head() {
    const { title, subtitle, verdict, checks } = this.data
    document.title = $('title').textContent = title
    $('subtitle').textContent = subtitle
    $('verdict').className = NAMES[verdict.state][0]
    $('says').textContent = verdict.says
    $('then').textContent = verdict.then
    const unseen = checks.filter(one => one.state === 'not looked at'), names = unseen.map(one => one.name).join(', ')
    $('unseen').hidden = !unseen.length
    $('unseen-names').textContent = `${NAMES['not looked at'][1]}: ${names}`
    for (const { name, state, says, look } of checks) {
      const item = element('li', $(state === 'not looked at' ? 'unseen-checks' : 'checks'))
      element('span', item, NAMES[state][1], 'state ' + NAMES[state][0])
      element('strong', item, ' ' + name)
      element('div', item, says)
      if (state !== 'good') element('code', item, (state === 'bad' ? 'looks closer: ' : 'looks: ') + look)
    }
  }

  run() {
    $('run-section').hidden = !this.data.run.length
    const plots = element('div', $('run'), undefined, 'plots')
    for (const one of this.data.run) this.curve(plots, one, one.name, 150, true)
  }

  // one.at is the column that is marked, by default that of the verdict; one.together: all lines have the same codes.
  curve(parent, one, title, height, heading) {
    const lines = one.labels.map((label, place) => (
      { label, values: new Float32Array(this.buffer, one.lines + place * this.columns * 4, this.columns) }))
    const codes = one.codes === null ? null : this.cells(one.codes, one.together ? this.columns : one.labels.length * this.columns)
    const { first, at, atStep } = this.data, marked = one.at === undefined ? (atStep === null ? undefined : at) : one.at
    const options = {
      height, heading: heading ? title : undefined, band: one.band, at: first[marked], stepName: place => this.stepName(place),
      isOdd: (line, place) => !Number.isFinite(lines[line].values[place]) && codes !== null && codes[one.together ? place : line * this.columns + place] >= this.data.codes.infinite,
    }
    drawn.push(new Curve(parent, title, this.data.first, lines, options))
  }

  // Make room for another curve.
  clear(parent) {
    const before = drawn.findIndex(one => one.parent === parent)
    if (before >= 0) drawn.splice(before, 1)
    parent.replaceChildren()
  }

  // --- Tensors and steps.

  maps() {
    $('maps').hidden = $('curve-section').hidden = !this.data.kinds.length
    if (!this.data.kinds.length) return
    const grouped = this.data.kinds.some(one => one.layers)
    if (grouped) $('kind').add(new Option('all kinds, by layer', '-1'))
    this.data.kinds.forEach((one, place) => $('kind').add(new Option(`${one.name} (${one.op})`, String(place))))
    $('kind').addEventListener('change', () => this.showKind(Number($('kind').value)))
    $('back').addEventListener('click', () => { this.showKind(Number($('kind').value)); this.map.canvas.focus() })
    this.map = new HeatMap($('tensors'), 'Tensors by steps', this.colours,
      (row, column, code) => { $('tip').textContent = `${this.view.name(row)}, step ${this.stepName(column)}: ${this.meaning(code)}` },
      (row, column) => this.choose(row, column))
    this.ranks = new HeatMap($('by-rank'), 'Ranks by tensors', this.colours,
      (row, column, code) => { $('rank-tip').textContent = `${this.rankName(row)}, ${this.kind.series[column]}: ${this.meaning(code)}` },
      (row, column) => this.showCurve(column))
    drawn.push(this.map, this.ranks)
    this.legend()
    const start = this.data.start
    const kind = this.data.kinds.findIndex(one => one.name === start.kind)
    $('kind').value = grouped && this.data.verdict.state !== 'bad' ? '-1' : String(Math.max(kind, 0))
    this.column = this.data.at
    if ($('kind').value === '-1') {
      this.showKind(-1)
      this.showFrame(this.data.kinds[Math.max(kind, 0)])
      this.showCurve(this.kind.series.indexOf(start.tensor))
    } else this.go(start.kind, start.tensor, null)
    tableBehind($('maps'), 'Tables', ['picture'], 2, place => ({ cells: [cell => this.tables(cell, place)] }))
  }

  tables(cell, place) {
    const [title, map, row, column] = [
      ['Tensor × step', this.map, 'tensor', place => this.stepName(place)], ['Rank × tensor', this.ranks, 'rank', place => this.kind.series[place]],
    ][place]
    const box = element('div', cell)
    const fill = () => {
      box.replaceChildren()
      element('p', box, `${title}: for each row, the cell that is furthest from normal, and its place`)
      fillTable(box, [row, 'at', 'value', 'cells that are NaN', 'infinite', 'not recorded'], map.rows, place => {
        const cells = map.cells.subarray(place * map.columns, (place + 1) * map.columns), worst = cells.indexOf(cells.reduce((a, b) => Math.max(a, b)))
        const count = code => cells.reduce((sum, one) => sum + (one === code), 0), { nan, infinite } = this.data.codes
        return { cells: [map.rowName(place), column(worst), this.meaning(cells[worst]), count(nan), count(infinite), count(0)] }
      })
    }
    fill()
    map.changed = fill
  }

  legend() {
    const { warmUp, least, partly, most, differs, infinite, nan } = this.data.codes
    const levels = Array.from({ length: differs - least }, (_, level) => least + level).filter(code => code !== partly)
    sample($('legend'), this.colours, levels, 130, `0 to ${most} standard deviations or more`)
    for (const code of [differs, infinite, nan, 0, partly, warmUp]) sample($('legend'), this.colours, [code], 14, this.meaning(code))
    for (const [what, { sign, says }] of Object.entries(MARKS)) {
      if (this.data.marks.some(one => one.what === what)) element('li', $('legend'), `${sign} ${says}`)
    }
  }

  // A view is what the first heat map shows: series of a kind, layers of kinds, or members of a layer.
  series(kind, numbers, offset) {
    const every = numbers || kind.series.map((_, place) => place)
    return {
      cells: this.cells(offset, every.length * this.columns), rows: every.length, name: row => kind.series[every[row]],
      choose: row => { this.showFrame(kind); this.showCurve(every[row]) }, row: number => every.indexOf(number),
    }
  }

  layers(kinds) {
    const rows = kinds.flatMap(kind => kind.layers.listed.map((layer, place) => ({ kind, layer, place })))
    const cells = new Uint8Array(rows.length * this.columns)
    rows.forEach(({ kind, place }, row) => cells.set(this.cells(kind.layers.cells + place * this.columns, this.columns), row * this.columns))
    return {
      cells, rows: rows.length, name: row => (kinds.length > 1 ? rows[row].kind.name + ' ' : '') + rows[row].layer.name,
      choose: row => this.open(rows[row].kind, rows[row].layer), row: () => -1,
    }
  }

  open(kind, layer) {
    if (layer.cells === null) {
      $('tip').textContent = `The page has no room for the ${layer.members.length} tensors of ${layer.name}. trainermon query shows them.`
      return
    }
    $('back').hidden = false
    this.show(this.series(kind, layer.members, layer.cells))
    this.showFrame(kind)
    this.showCurve(layer.members[0])
  }

  showKind(place) {
    const kinds = place < 0 ? this.data.kinds : [this.data.kinds[place]]
    $('back').hidden = true
    this.show(kinds[0].layers ? this.layers(kinds) : this.series(kinds[0], null, kinds[0].cells))
    if (place >= 0) this.showFrame(kinds[0])
  }

  show(view) {
    this.view = view
    const { cells, rows } = view
    this.map.show({ cells, rows, columns: this.columns, rowName: view.name, columnName: column => this.stepName(column), marks: this.data.marks, ticks: count => this.ticks(count) })
    if (this.map.changed) this.map.changed()
  }

  choose(row, column) {
    this.column = column
    this.view.choose(row)
  }

  // --- Ranks, and the curve of a tensor.

  rankName(row) {
    const { ranks } = this.data, size = this.kind.rankGroup, last = Math.min((row + 1) * size, ranks.length) - 1
    return size === 1 ? `rank ${ranks[row]}` : `ranks ${ranks[row * size]} to ${ranks[last]}`
  }

  showFrame(kind) {
    this.kind = kind
    if (!kind.frames.length) return
    const nearest = (a, b) => Math.abs(b.at - this.column) < Math.abs(a.at - this.column) ? b : a
    const frame = kind.frames.reduce(nearest), rows = Math.ceil(this.data.ranks.length / kind.rankGroup), columns = kind.series.length
    $('frame-step').textContent = `step ${this.stepName(frame.at)}, ${kind.name}`
    this.ranks.show({
      cells: this.cells(frame.cells, rows * columns), rows, columns, rowName: row => this.rankName(row), columnName: column => kind.series[column],
    })
    if (this.ranks.changed) this.ranks.changed()
  }

  showCurve(series) {
    const one = this.kind.curves.find(one => one.series === series), name = this.kind.series[series]
    $('curve-title').textContent = `${this.kind.name} ${name}: ${this.kind.op} by step`
    this.clear($('curve'))
    if (one) this.curve($('curve'), one, `${this.kind.name} ${name}`, 230, false)
    else element('p', $('curve'), `The page has no room for this curve. trainermon query RUN "select step, rank, ${this.kind.op} from ${this.kind.name} where name = …" prints it.`)
  }

  // Show the place of an event in all pictures.
  go(kind, tensor, step, rank) {
    const place = this.data.kinds.findIndex(one => one.name === kind)
    if (place < 0) return
    $('kind').value = String(place)
    if (step !== null) this.column = Math.max(0, this.data.last.findIndex(last => step <= last))
    this.showKind(place)
    const number = this.kind.series.indexOf(tensor)
    if (number < 0) return
    if (this.kind.layers) {
      const layer = this.kind.layers.listed.find(one => one.members.includes(number))
      this.open(this.kind, layer)
    }
    this.showCurve(number)
    const row = this.view.row(number)
    if (row >= 0) this.map.move(row, this.column)
    if (rank !== null && rank !== undefined) this.ranks.move(Math.floor(this.data.ranks.indexOf(rank) / this.kind.rankGroup), number)
  }

  // --- Lists.

  link(one, text) {
    return cell => {
      const button = element('button', cell, text, 'link')
      button.type = 'button'
      button.addEventListener('click', () => {
        this.go(one.kind, one.tensor, one.step, one.rank)
        $('maps').scrollIntoView()
        this.map.canvas.focus({ preventScroll: true })
      })
    }
  }

  lists() {
    const { events, unusual } = this.data
    if (events.length) {
      fillTable($('events'), ['', 'rank', 'step', 'micro-step', 'tensor', 'what', 'remark'], events.length, place => {
        const one = events[place]
        const cells = [one.origin ? 'origin' : '', one.rank, one.step, one.micro_step, this.link(one, `${one.kind} ${one.tensor}`), one.says, one.remark]
        return { cells, name: one.origin ? 'origin' : '' }
      })
    } else element('p', $('events'), 'There are none.', 'quiet')
    if (unusual.length) {
      fillTable($('unusual'), ['tensor', 'step', 'rank', 'statistic', 'value', 'before', 'standard deviations'], unusual.length, place => {
        const one = unusual[place]
        return { cells: [this.link(one, `${one.kind} ${one.tensor}`), one.step, one.rank, one.statistic, one.value, one.before, one.deviations] }
      })
    } else element('p', $('unusual'), 'None is far from its own history.', 'quiet')
  }

  histograms() {
    $('histograms-section').hidden = !this.data.histograms.length
    for (const one of this.data.histograms) {
      const { rows, columns } = one, title = `${one.kind} ${one.tensor}, rank ${one.rank}`
      element('p', $('histograms'), `${title}: elements by magnitude and step; yellow is the most frequent`)
      const tip = element('p', null, '', 'quiet')
      const map = new HeatMap($('histograms'), title, this.colours,
        (row, column) => { tip.textContent = `${one.names[row]}, step ${one.steps[column]}: ${one.counts[row * columns + column]} elements` }, () => {})
      tip.setAttribute('role', 'status')
      $('histograms').append(tip)
      map.show({ cells: this.cells(one.cells, rows * columns), rows, columns, rowName: row => one.names[row], columnName: column => String(one.steps[column]) })
      tableBehind($('histograms'), 'Table', ['magnitude', ...one.steps], rows, row => (
        { cells: [one.names[row], ...one.counts.slice(row * columns, (row + 1) * columns)] }))
      drawn.push(map)
    }
  }

  about() {
    const list = element('dl', $('about'))
    for (const [label, text] of this.data.about) {
      element('dt', list, label)
      element('dd', list, text)
    }
    if (!this.data.configuration) return
    const details = element('details', $('about'))
    element('summary', details, 'Configuration')
    element('pre', details, this.data.configuration)
  }
}

async function start() {
  const report = new Report(JSON.parse($('data').textContent), await unpacked($('arrays').textContent))
  report.head()
  if (report.data.against) new Against(report.data.against, report.buffer).show()
  report.run()
  report.maps()
  report.lists()
  report.histograms()
  report.about()
  const again = () => drawn.forEach(one => one.draw())
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again)
  let width = document.body.clientWidth
  addEventListener('resize', () => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; again() } })
  document.body.dataset.ready = String(Math.round(performance.now() - began))
}

// Once all scripts are there.
addEventListener('DOMContentLoaded', () => start().catch(error => {
  $('says').textContent = `The page could not be shown: ${error}`
  throw error
}))
